"""The driver of an elastic job: discovers hosts, decides who is a member, starts workers."""
