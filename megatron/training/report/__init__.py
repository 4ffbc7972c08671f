"""What a run reports: metrics, log, TensorBoard, timers."""
