"""The benchmarks' HTTP client: what it costs must not be measured, so nothing is parsed while a load runs."""
