"""Reports of a run: metrics, log, TensorBoard, timers, slow ranks."""
