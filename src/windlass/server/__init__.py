"""The HTTP server: routes over ports. Only wiring/ knows the adapters behind the ports."""
