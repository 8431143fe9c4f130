"""The wire: generated messages (``*_pb2``), their framing, and their translation to `toque.types`."""
