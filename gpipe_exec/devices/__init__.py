"""What a rank's process and device tell: clocks, spans and bytes."""
