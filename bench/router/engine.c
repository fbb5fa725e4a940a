// A mock engine: any number of prefill and decode ports in one thread, fast enough not to matter.
//
//   engine TOKENS_PER_S prefill PORT... decode PORT...
//
// Prints "ready" when all ports listen. POST on a prefill port answers one token as JSON, whatever
// it asks. On a decode port it answers max_tokens tokens, whole at once or as a stream at the pace.
// Two wires: plain (vLLM's: the id echoes X-Request-Id), and, where kv_transfer_params asks for it,
// ours with continuation (P says token_ids and kv_transfer_params, D token_ids in its chunks, under
// the id that it was given). A token of a stream is "@" and the clock when it was written: whoever
// reads it on this machine knows how long it was under way. A GET answers 200.
#define _GNU_SOURCE
#include <errno.h>
#include <unistd.h>

#include "answers.h"
#include "base.h"
#include "wheel.h"

enum {
  BODY_MAX = 64 << 20,
  EVENT = 300,       // bytes of one event of a stream; a P/D id of vLLM is in it
  OUT_MAX = 4 << 20  // what a reader that does not read may leave unsent
};

struct stream {
  struct alarm next_token;  // first: an alarm's address is its stream's
  struct connection *owner;
  long left;                 // tokens
  char event[DOCUMENT_MAX];  // with the frame of its HTTP chunk
  int event_length;
  char *stamp;
  char end[DOCUMENT_MAX];  // the last event, [DONE], the chunk of length 0
  int end_length;
};

struct connection {
  int fd;
  char is_listener, is_prefill, is_blocked;
  char *in, *out;
  size_t in_length, in_size, out_length, out_size;
  struct stream *stream;
  struct connection *next_dead;
};

static int poll_fd;
static long step_ns;
static struct connection *dead;  // freed when all events of a round are handled

static void end_stream(struct connection *c) {
  clear_alarm(&c->stream->next_token);
  free(c->stream);
  c->stream = NULL;
}

static void drop(struct connection *c) {
  if (c->fd < 0) return;
  if (c->stream) end_stream(c);
  close(c->fd);
  c->fd = -1;
  c->next_dead = dead;
  dead = c;
}

static void block(struct connection *c, int is_blocked) {
  if (c->is_blocked == is_blocked) return;
  c->is_blocked = is_blocked;
  watch(poll_fd, EPOLL_CTL_MOD, c->fd, is_blocked, c);
}

static void reserve(char **buffer, size_t *size, size_t wanted) {
  if (*size >= wanted) return;
  *size = wanted < 4096 ? 4096 : wanted * 2;
  *buffer = realloc(*buffer, *size);
  must(*buffer != NULL, "memory");
}

static void flush(struct connection *c) {
  ssize_t sent = send(c->fd, c->out, c->out_length, MSG_NOSIGNAL);
  if (sent < 0 && errno != EAGAIN) return drop(c);
  if (sent > 0) {
    c->out_length -= sent;
    memmove(c->out, c->out + sent, c->out_length);
  }
  block(c, c->out_length > 0);
}

static void put(struct connection *c, const char *data, size_t length) {
  if (c->out_length == 0) {
    ssize_t sent = send(c->fd, data, length, MSG_NOSIGNAL);
    if (sent == (ssize_t)length) return;
    if (sent < 0 && errno != EAGAIN) return drop(c);
    if (sent > 0) data += sent, length -= sent;
  }
  if (c->out_length + length > OUT_MAX) return drop(c);
  reserve(&c->out, &c->out_size, c->out_length + length);
  memcpy(c->out + c->out_length, data, length);
  c->out_length += length;
  block(c, 1);
}

static void answer(struct connection *c, int status, const char *body, int length) {
  char text[DOCUMENT_MAX + 200];
  int n = snprintf(text, sizeof text,
                   "HTTP/1.1 %d OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
                   "%.*s", status, length, length, body);
  put(c, text, n);
}

static void answer_whole(struct connection *c, const struct ask *a) {
  char text[32], body[DOCUMENT_MAX];
  snprintf(text, sizeof text, " @%0*ld", STAMP_DIGITS, now_ns());
  answer(c, 200, body, write_answer(body, a, text, c->is_prefill));
}

static void begin_stream(struct connection *c, const struct ask *a) {
  struct stream *s = calloc(1, sizeof *s);
  must(s != NULL, "memory");
  // The text is as long as it must be for the event to be as long as all are.
  char text[EVENT + 1], event[DOCUMENT_MAX];
  int around = write_chunk(event, a, "", 0) + strlen("data: }\n\n");
  int length = EVENT - around < STAMP_DIGITS + 2 ? STAMP_DIGITS + 2 : EVENT - around;
  memset(text, 'x', sizeof text);
  snprintf(text, sizeof text, " @%0*d", STAMP_DIGITS, 0);
  text[STAMP_DIGITS + 2] = 'x';
  text[length] = 0;
  write_chunk(event, a, text, 0);
  s->event_length = snprintf(s->event, sizeof s->event, "%x\r\ndata: %s}\n\n\r\n", around + length, event);
  s->stamp = strstr(s->event, "\" @") + 3;
  int last = write_chunk(event, a, "", 1) + strlen("data: }\n\ndata: [DONE]\n\n");
  s->end_length = snprintf(s->end, sizeof s->end,
                           "%x\r\ndata: %s}\n\ndata: [DONE]\n\n\r\n0\r\n\r\n", last, event);
  s->owner = c;
  s->left = a->tokens;
  s->next_token.due_ns = now_ns() + step_ns;
  c->stream = s;
  set_alarm(&s->next_token);
  static const char head[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                             "transfer-encoding: chunked\r\n\r\n";
  put(c, head, sizeof head - 1);
}

static void serve_all(struct connection *c);

static void send_token(struct alarm *due) {
  struct stream *s = (struct stream *)due;
  struct connection *c = s->owner;
  if (s->left-- > 0) {
    char digits[24];
    snprintf(digits, sizeof digits, "%0*ld", STAMP_DIGITS, now_ns());
    memcpy(s->stamp, digits, STAMP_DIGITS);
    s->next_token.due_ns += step_ns;
    set_alarm(&s->next_token);
    return put(c, s->event, s->event_length);
  }
  put(c, s->end, s->end_length);
  if (c->stream) end_stream(c);
  serve_all(c);
}

// A header's value in a head that ends behind its last "\r\n".
static struct span header(const char *head, const char *name) {
  size_t length = strlen(name);
  for (const char *line = head; (line = strchr(line, '\n')) && line[1] != '\r';) {
    line++;
    if (strncasecmp(line, name, length) || line[length] != ':') continue;
    const char *at = line + length + 1;
    while (*at == ' ') at++;
    return (struct span){at, strchr(at, '\r')};
  }
  return (struct span){NULL, NULL};
}

static void serve(struct connection *c, const char *head, struct span body) {
  static const char models[] = "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\"}]}";
  static const char about[] = "{\"status\":\"ok\",\"model_path\":\"m\",\"served_model_name\":\"m\"}";
  if (!strncmp(head, "GET /v1/models", 14)) return answer(c, 200, models, sizeof models - 1);
  if (!strncmp(head, "GET ", 4)) return answer(c, 200, about, sizeof about - 1);
  int is_chat = !strncmp(head, "POST /v1/chat/completions ", 26);
  if (!is_chat && strncmp(head, "POST /v1/completions ", 21)) return answer(c, 404, "{}", 2);
  struct ask a = read_ask(body, header(head, "x-request-id"), is_chat, c->is_prefill);
  if (a.is_stream && !c->is_prefill) begin_stream(c, &a);
  else answer_whole(c, &a);
}

// Serve what is whole in the buffer; a request behind a running stream waits for its end.
static void serve_all(struct connection *c) {
  size_t used = 0;
  while (c->fd >= 0 && !c->stream && used < c->in_length) {
    char *head = c->in + used, *end = memmem(head, c->in_length - used, "\r\n\r\n", 4);
    if (!end && c->in_length - used > HEAD_MAX) return drop(c);
    if (!end) break;
    end[3] = 0;
    struct span length = header(head, "content-length");
    long bytes = length.at ? strtol(length.at, NULL, 10) : 0;
    if (bytes < 0 || bytes > BODY_MAX || header(head, "transfer-encoding").at) return drop(c);
    size_t whole = end + 4 - head + bytes;
    if (c->in_length - used < whole) {
      end[3] = '\n';
      reserve(&c->in, &c->in_size, used + whole + 1);
      break;
    }
    serve(c, head, (struct span){end + 4, end + 4 + bytes});
    used += whole;
  }
  if (c->fd < 0 || !used) return;
  c->in_length -= used;
  memmove(c->in, c->in + used, c->in_length);
}

static void take(struct connection *c) {
  reserve(&c->in, &c->in_size, c->in_length + 2048);
  ssize_t got = recv(c->fd, c->in + c->in_length, c->in_size - c->in_length, 0);
  if (got == 0 || (got < 0 && errno != EAGAIN)) return drop(c);
  if (got < 0) return;
  c->in_length += got;
  serve_all(c);
}

static struct connection *add(int fd, int is_prefill) {
  struct connection *c = calloc(1, sizeof *c);
  must(c != NULL, "memory");
  c->fd = fd, c->is_prefill = is_prefill;
  watch(poll_fd, EPOLL_CTL_ADD, fd, 0, c);
  return c;
}

static void take_connections(struct connection *listener) {
  for (int fd; (fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK)) >= 0;) {
    send_at_once(fd);
    add(fd, listener->is_prefill);
  }
}

static void listen_on(int port, int is_prefill) {
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
  struct sockaddr_in at = loopback(port);
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  must(!bind(fd, (void *)&at, sizeof at) && !listen(fd, 4096), "listen");
  add(fd, is_prefill)->is_listener = 1;
}

int main(int count, char **words) {
  must(count > 3 && atof(words[1]) > 0, "engine TOKENS_PER_S prefill PORT... decode PORT...");
  step_ns = NS / atof(words[1]);
  must(step_ns >= SLOT_NS, "at most 1000 tokens/s");
  poll_fd = epoll_create1(0);
  int is_prefill = 1;
  for (int i = 2; i < count; i++) {
    if (atoi(words[i])) listen_on(atoi(words[i]), is_prefill);
    else is_prefill = !strcmp(words[i], "prefill");
  }
  wheel_slot = now_ns() / SLOT_NS;
  puts("ready");
  fflush(stdout);
  struct epoll_event events[256];
  for (;;) {
    int n = epoll_wait(poll_fd, events, 256, alarms ? 1 : 1000);
    for (int i = 0; i < n; i++) {
      struct connection *c = events[i].data.ptr;
      if (c->is_listener) take_connections(c);
      else {
        if (c->fd >= 0 && events[i].events & EPOLLOUT) flush(c);
        if (c->fd >= 0 && events[i].events & ~EPOLLOUT) take(c);
      }
    }
    turn_wheel(send_token);
    for (struct connection *c; (c = dead); free(c->in), free(c->out), free(c)) dead = c->next_dead;
  }
}
