"""What a node shows of itself: health, metrics, status, and the page."""
