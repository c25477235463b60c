"""What runs on a rank, under Spark's launcher or plain torchrun."""
