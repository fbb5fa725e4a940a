// What both programs need: the clock, an end with a reason, sockets on 127.0.0.1.
#pragma once
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>

#define NS 1000000000L

// Digits of a token's time: of the monotonic clock in ns, behind an "@".
enum { STAMP_DIGITS = 19, HEAD_MAX = 16384 };

static inline long now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * NS + t.tv_nsec;
}

static inline void must(int holds, const char *what) {
  if (holds) return;
  perror(what);
  exit(2);
}

static inline struct sockaddr_in loopback(int port) {
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port)};
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return at;
}

static inline void send_at_once(int fd) {
  int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

static inline void watch(int poll_fd, int change, int fd, int wants_out, void *what) {
  struct epoll_event e = {.events = EPOLLIN | (wants_out ? EPOLLOUT : 0), .data.ptr = what};
  must(!epoll_ctl(poll_fd, change, fd, &e), "epoll_ctl");
}
