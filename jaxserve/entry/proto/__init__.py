"""The gRPC contract: jaxserve.proto and what is generated from it."""
