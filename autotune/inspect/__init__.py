"""Compiles any kernel for any GPU on any machine, and tells what bounds its main loop."""
