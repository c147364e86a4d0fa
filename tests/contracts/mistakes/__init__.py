"""Natural mistakes, as tables: a script or a command, its exit code, and the one line that says what is wrong."""
