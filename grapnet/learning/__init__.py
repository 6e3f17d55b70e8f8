"""What trains a graph, or any model."""
