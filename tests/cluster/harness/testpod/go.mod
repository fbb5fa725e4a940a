module xpyd.dev/testcluster/testpod

go 1.24
