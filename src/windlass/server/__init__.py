"""The control plane's HTTP face: thin handlers over ports. Who is behind the ports, wire says."""
