"""The protocol: standard library only, readable in one sitting."""
