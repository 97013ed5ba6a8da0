"""Where readings of devices come from: NVML, and any exporter that speaks Prometheus' text, by a mapping. One port: `port.Source`."""
