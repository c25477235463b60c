"""From text to tokens: pure functions, no Spark and no process group."""
