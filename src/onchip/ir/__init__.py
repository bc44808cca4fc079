"""What a computation is: expressions, tensors, the graph, index bounds and algebra."""
