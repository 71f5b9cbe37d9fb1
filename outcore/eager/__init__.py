"""The eager front end: records and runs steps through dispatch modes and saved-tensor hooks."""
