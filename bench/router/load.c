// A load generator for OpenAI's completions on 127.0.0.1: connections that each ask again once they
// have their answer, or streams that are opened one after another and read to their end.
//
//   load PORT closed CONNECTIONS PROMPT_BYTES WARM_S SECONDS
//   load PORT count CONNECTIONS PROMPT_BYTES REQUESTS
//   load PORT streams STREAMS PROMPT_BYTES RAMP_S WARM_S SECONDS TOKENS
//
// `closed` and `streams` print "begin" when the warm-up is over and "end" when the time is: answers
// and tokens that come between them count. The last line is JSON. An answer is an error unless it
// is a 200 with as many of the mock engine's stamps as asked (a whole answer has one) and, streamed,
// [DONE] as its end; a connection that had an error is not used again. XPYD_API_KEY, if it is set,
// is sent as the client's key. Compiled with TLS (and -lssl -lcrypto) it speaks TLS, and takes any
// certificate.
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <sys/uio.h>
#include <unistd.h>

#ifdef TLS
#include <openssl/err.h>
#include <openssl/ssl.h>
#endif

#include "response.h"

enum { WHOLE_TOKENS = 16, PATIENCE_S = 60, COUNT_PATIENCE_S = 300, NUMBER_DIGITS = 12 };

// All are kept, so that a percentile is exact.
struct samples {
  uint32_t *tenths_us;
  size_t count, size;
};

struct connection {
  struct response response;  // first: a response's address is its connection's
  int fd;                    // -1: not, or no longer, in use
  char is_connected, is_blocked;
  char *own;  // the request up to the prompt's number; the rest is common to all
  size_t unsent;
  long sent_ns;
#ifdef TLS
  SSL *tls;
#endif
};

static int poll_fd, port, is_stream, live;
static long asked_tokens, window_begin, window_end, clock_ns;
static struct samples latency, ttft, relay;
static long answered, tokens, errors, prompts, to_send = -1;
static char first_error[200];
static char *request;
static size_t request_length, own_length;

static int is_counted(void) { return clock_ns >= window_begin && clock_ns < window_end; }

static void keep(struct samples *s, long ns) {
  if (s->count == s->size) {
    s->size = s->size ? s->size * 2 : 65536;
    s->tenths_us = realloc(s->tenths_us, s->size * sizeof *s->tenths_us);
    must(s->tenths_us != NULL, "memory");
  }
  s->tenths_us[s->count++] = ns < 0 ? 0 : ns / 100;
}

static void make_request(int prompt_bytes) {
  char *body = malloc(prompt_bytes + 200);
  request = malloc(prompt_bytes + 1000);
  must(body && request && prompt_bytes >= NUMBER_DIGITS, "prompt of at least 12 bytes");
  int n = sprintf(body, "{\"model\":\"m\",\"max_tokens\":%ld,\"stream\":%s,\"prompt\":\"",
                  asked_tokens, is_stream ? "true" : "false");
  int number_end = n + NUMBER_DIGITS;
  for (int i = 0; i < prompt_bytes; i++) body[n++] = i % 6 == 5 ? ' ' : 'a' + i * 7 % 26;
  n += sprintf(body + n, "\"}");
  char line[600] = "";
  const char *key = getenv("XPYD_API_KEY");
  if (key) snprintf(line, sizeof line, "authorization: Bearer %.512s\r\n", key);
  int head = sprintf(request,
                     "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\n"
                     "content-type: application/json\r\n%scontent-length: %d\r\n\r\n", port, line, n);
  memcpy(request + head, body, n);
  free(body);
  request_length = head + n;
  own_length = head + number_end;
}

static void dial(struct connection *c) {
  c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  must(c->fd >= 0, "socket");
  send_at_once(c->fd);
  struct sockaddr_in at = loopback(port);
  must(!connect(c->fd, (void *)&at, sizeof at) || errno == EINPROGRESS, "connect");
  c->is_connected = 0, c->is_blocked = 1;
  live++;
  watch(poll_fd, EPOLL_CTL_ADD, c->fd, 1, c);
}

#ifdef TLS
static SSL_CTX *tls_context;

static void make_context(void) {
  tls_context = SSL_CTX_new(TLS_client_method());
  must(tls_context != NULL, "OpenSSL");
  SSL_CTX_set_mode(tls_context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
}

// 1: done, 0: when the server has said more, -1: failed.
static int shake_hands(struct connection *c) {
  if (!c->tls) {
    c->tls = SSL_new(tls_context);
    SSL_set_fd(c->tls, c->fd);
  }
  int got = SSL_connect(c->tls), why = SSL_get_error(c->tls, got);
  ERR_clear_error();
  if (got == 1) return 1;
  if (why != SSL_ERROR_WANT_READ) return -1;
  if (c->is_blocked) watch(poll_fd, EPOLL_CTL_MOD, c->fd, c->is_blocked = 0, c);
  return 0;
}

static int is_shaking(struct connection *c) { return c->tls && !c->is_connected; }

// As recv, of one record.
static ssize_t take(struct connection *c, char *buffer, size_t size) {
  if (!c->is_connected) return recv(c->fd, buffer, size, 0);  // what connecting ended with
  int got = SSL_read(c->tls, buffer, size);
  if (got > 0) return got;
  int why = SSL_get_error(c->tls, got);
  ERR_clear_error();
  if (why == SSL_ERROR_ZERO_RETURN) return 0;
  errno = why == SSL_ERROR_WANT_READ || why == SSL_ERROR_WANT_WRITE ? EAGAIN : ECONNRESET;
  return -1;
}

// As writev; one record where both parts fit.
static ssize_t put(struct connection *c, struct iovec *parts, int count) {
  static char joined[16 * 1024];
  size_t size = 0;
  for (int i = 0; i < count; i++) {
    size_t part = parts[i].iov_len, room = sizeof joined - size;
    part = part < room ? part : room;
    memcpy(joined + size, parts[i].iov_base, part);
    size += part;
  }
  int sent = size ? SSL_write(c->tls, joined, size) : 0;
  ERR_clear_error();
  return sent;
}
#else
static void make_context(void) {}
static int is_shaking(struct connection *c) { return c == NULL; }
static int shake_hands(struct connection *c) { return c != NULL; }
static ssize_t take(struct connection *c, char *buffer, size_t size) {
  return recv(c->fd, buffer, size, 0);
}
static ssize_t put(struct connection *c, struct iovec *parts, int count) {
  return writev(c->fd, parts, count);
}
#endif

static void hang_up(struct connection *c) {
#ifdef TLS
  SSL_free(c->tls);
  c->tls = NULL;
#endif
  close(c->fd);
  c->fd = -1;
  live--;
}

static void push(struct connection *c) {
  size_t done = request_length - c->unsent, own = done < own_length ? own_length - done : 0;
  size_t rest = done < own_length ? own_length : done;
  struct iovec parts[] = {{c->own + done, own}, {request + rest, request_length - rest}};
  ssize_t sent = put(c, own ? parts : parts + 1, own ? 2 : 1);
  if (sent > 0) c->unsent -= sent;
  if (c->is_blocked == (c->unsent > 0)) return;
  c->is_blocked = c->unsent > 0;
  watch(poll_fd, EPOLL_CTL_MOD, c->fd, c->is_blocked, c);
}

static void on_stamp(struct response *r) {
  struct connection *c = (struct connection *)r;
  if (is_stream && r->stamps == 1) keep(&ttft, clock_ns - c->sent_ns);
  if (!is_counted()) return;
  tokens++;
  keep(&relay, clock_ns - r->stamp);
}

static void ask(struct connection *c) {
  if (to_send == 0) return hang_up(c);
  if (to_send > 0) to_send--;
  // No cache of prefixes, whoever has it, is to take one prompt for another.
  char number[24];
  snprintf(number, sizeof number, "%0*ld", NUMBER_DIGITS, prompts++);
  memcpy(c->own + own_length - NUMBER_DIGITS, number, NUMBER_DIGITS);
  begin_response(&c->response, on_stamp);
  c->sent_ns = now_ns();
  c->unsent = request_length;
  push(c);
}

static void fail(struct connection *c, const char *what) {
  struct response *r = &c->response;
  errors++;
  if (!*first_error)
    snprintf(first_error, sizeof first_error, "%s: status %d, %d stamps, ends in %.8s", what,
             r->status, r->stamps, r->tail);
  for (char *p = first_error; *p; p++)
    if (*p < ' ' || *p == '"' || *p == '\\' || *p == 127) *p = ' ';
  hang_up(c);
}

static void finish(struct connection *c) {
  struct response *r = &c->response;
  if (r->status != 200) return fail(c, "refused");
  if (r->stamps != (is_stream ? asked_tokens : 1)) return fail(c, "wrong number of tokens");
  if (is_stream && memcmp(r->tail, "[DONE]\n\n", 8)) return fail(c, "no [DONE]");
  if (is_stream) {
    answered++;  // streams end when the window is over
    return hang_up(c);
  }
  if (is_counted()) {
    answered++;
    keep(&latency, clock_ns - c->sent_ns);
  }
  if (r->is_keeping) return ask(c);
  hang_up(c);
  dial(c);
}

static void begin(struct connection *c) {
  int done = shake_hands(c);
  if (done < 0) return fail(c, "no TLS");
  if (!done) return;
  c->is_connected = 1;
  ask(c);
}

static void readable(struct connection *c) {
  static char buffer[256 * 1024];
  if (is_shaking(c)) return begin(c);
  ssize_t got = take(c, buffer, sizeof buffer);
  if (got < 0 && errno == EAGAIN) return;
  if (got < 0) return fail(c, strerror(errno));
  if (!c->is_connected) return fail(c, "connection closed");
  if (got == 0) close_response(&c->response);
  else read_response(&c->response, buffer, got);
  if (c->response.state == BROKEN) return fail(c, got ? "no HTTP" : "connection closed");
  if (c->response.state == OVER) finish(c);
}

static void writable(struct connection *c) {
  if (c->is_connected) return push(c);
  int error = 0;
  getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &(socklen_t){sizeof error});
  if (error) return fail(c, strerror(error));
  begin(c);
}

static int by_size(const void *a, const void *b) {
  uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
  return (x > y) - (x < y);
}

static void print_samples(const char *name, struct samples *s) {
  if (!s->count) return (void)printf(",\"%s\":null", name);
  qsort(s->tenths_us, s->count, sizeof *s->tenths_us, by_size);
  const char *names[] = {"p50", "p90", "p99", "max"};
  const double shares[] = {0.5, 0.9, 0.99, 1};
  printf(",\"%s\":{\"count\":%zu", name, s->count);
  for (int i = 0; i < 4; i++)
    printf(",\"%s\":%.1f", names[i], s->tenths_us[(size_t)((s->count - 1) * shares[i])] / 10.0);
  printf("}");
}

// Until the time is over, or nothing is left to do.
static void run(struct connection *all, int connections, double ramp_s, long deadline) {
  long start = clock_ns = now_ns();
  int opened = 0, is_begun = window_begin <= start, is_ended = is_begun;
  struct epoll_event events[256];
  while ((live || opened < connections) && clock_ns < deadline) {
    for (; opened < connections && clock_ns - start >= ramp_s * NS * opened / connections; opened++)
      dial(&all[opened]);
    int n = epoll_wait(poll_fd, events, 256, opened < connections ? 1 : 10);
    clock_ns = now_ns();
    for (int i = 0; i < n; i++) {
      struct connection *c = events[i].data.ptr;
      if (c->fd >= 0 && events[i].events & EPOLLOUT) writable(c);
      if (c->fd >= 0 && events[i].events & ~EPOLLOUT) readable(c);
    }
    if (!is_begun && clock_ns >= window_begin) is_begun = 1, puts("begin"), fflush(stdout);
    if (!is_ended && clock_ns >= window_end) is_ended = 1, puts("end"), fflush(stdout);
  }
}

int main(int count, char **words) {
  int is_closed = count == 7 && !strcmp(words[2], "closed");
  int is_counting = count == 6 && !strcmp(words[2], "count");
  is_stream = count == 9 && !strcmp(words[2], "streams");
  must(is_closed || is_counting || is_stream, "arguments: see the top of load.c");
  port = atoi(words[1]);
  int connections = atoi(words[3]);
  double ramp_s = is_stream ? atof(words[5]) : 0, warm_s = 0, seconds = COUNT_PATIENCE_S;
  if (is_counting) to_send = atol(words[5]);
  else warm_s = ramp_s + atof(words[5 + is_stream]), seconds = atof(words[6 + is_stream]);
  asked_tokens = is_stream ? atol(words[8]) : WHOLE_TOKENS;
  make_request(atoi(words[4]));
  make_context();
  poll_fd = epoll_create1(0);
  struct connection *all = calloc(connections, sizeof *all);
  must(all != NULL, "memory");
  for (int i = 0; i < connections; i++) {
    all[i].fd = -1;
    all[i].own = malloc(own_length);
    must(all[i].own != NULL, "memory");
    memcpy(all[i].own, request, own_length);
  }
  long start = now_ns();
  window_begin = start + (long)(warm_s * NS);
  window_end = window_begin + (long)(seconds * NS);
  run(all, connections, ramp_s, window_end + (is_stream ? PATIENCE_S * NS : 0));
  if (is_counting) seconds = (clock_ns - start) / (double)NS;
  for (int i = 0; !is_closed && i < connections; i++)
    if (all[i].fd >= 0) fail(&all[i], "unfinished");
  printf("{\"seconds\":%.6f,\"answered\":%ld,\"tokens\":%ld,\"errors\":%ld,\"firstError\":\"%s\"",
         seconds, answered, tokens, errors, first_error);
  print_samples("latencyUs", &latency);
  print_samples("ttftUs", &ttft);
  print_samples("relayUs", &relay);
  puts("}");
}
