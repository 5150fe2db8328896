"""Whether a rewritten step computes in the arithmetic of the plain one."""
