"""Jobs over several hosts, rehearsed on one: network namespaces with links that are slow, and that can be cut."""
