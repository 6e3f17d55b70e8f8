"""The canonical graph: it stores."""
