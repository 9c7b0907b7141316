"""What the side bar asks over HTTP."""
