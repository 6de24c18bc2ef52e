"""A store whose answers are lost, refused, damaged and cut, one request after the other, and what a write then ends with."""
