"""Use of a trained model, on any layout."""
