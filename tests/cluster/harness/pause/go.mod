module xpyd.dev/testcluster/pause

go 1.24
