"""What goes over sockets between processes: formats alone."""
