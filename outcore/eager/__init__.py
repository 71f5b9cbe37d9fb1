"""The eager front end: records and runs steps through two unused dispatch keys and saved-tensor hooks."""
