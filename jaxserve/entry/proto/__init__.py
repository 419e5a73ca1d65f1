"""The gRPC contracts: the .proto files and what is generated from them."""
