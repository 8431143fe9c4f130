"""The process around one engine: sessions over a Unix socket or gRPC, health, drain."""
