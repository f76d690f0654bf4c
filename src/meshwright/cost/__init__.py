"""What a layout costs: time, memory and what moves, computed without devices."""
