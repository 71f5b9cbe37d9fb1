from __future__ import annotations

import os

# A store that ends while a centre still beats is part of many tests; torch's C++ stack traces about it are noise.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# TCPStore asks for the name of every address it meets; where the resolver loses an answer, waiting 5 s proves nothing.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
