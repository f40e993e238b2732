"""Binary units. FlexGen's own "GB" is GiB; iostat's "kB" is KiB."""

KIB = 2**10
MIB = 2**20
GIB = 2**30
