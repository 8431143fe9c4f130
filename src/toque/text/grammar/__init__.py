"""Structured output: what an answer must look like, checked, carried, and enforced token by token.

::

    gateway                              wire           replica
    GrammarSpec.json_schema(...)  ──▶  spec.encode() ──▶ GrammarSpec.decode ──▶ Compiler.compile ──▶ Matcher
    (unsupported keywords: 400)                          (worker thread)        a mask for each step
"""
