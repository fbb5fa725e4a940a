// Reads HTTP/1.1 answers in any cut: the status, the body's stamps, how it ends.
#pragma once
#include <string.h>

#include "base.h"

enum state { HEAD, BODY, SIZE, CHUNK, CHUNK_END, LAST_END, OVER, BROKEN };

struct response {
  enum state state;
  char head[HEAD_MAX];
  size_t head_length;
  long left;  // bytes of the body or of the chunk; -1: to the end of the connection
  int is_keeping, status;
  char line[20];  // of a chunk's size
  size_t line_length;
  char tail[8];  // the body's last bytes
  int stamps, digits;
  long stamp;
  void (*on_stamp)(struct response *);
};

static void begin_response(struct response *r, void (*on_stamp)(struct response *)) {
  r->state = HEAD;
  r->head_length = r->line_length = 0;
  r->stamps = r->digits = r->status = 0;
  r->on_stamp = on_stamp;
}

static int field(const char *head, const char *name, long *value) {
  const char *found = strcasestr(head, name);
  if (found && value) *value = strtol(found + strlen(name), NULL, 10);
  return found != NULL;
}

static size_t read_head(struct response *r, const char *data, size_t length) {
  size_t before = r->head_length, room = HEAD_MAX - 1 - before;
  size_t taken = length < room ? length : room;
  memcpy(r->head + before, data, taken);
  r->head_length += taken;
  r->head[r->head_length] = 0;
  char *end = strstr(r->head, "\r\n\r\n");
  if (!end) {
    if (r->head_length == HEAD_MAX - 1) r->state = BROKEN;
    return taken;
  }
  end[2] = 0;
  size_t used = end + 4 - r->head - before;
  r->status = end - r->head > 12 ? atoi(r->head + 9) : 0;
  r->is_keeping = !field(r->head, "\r\nconnection: close", NULL);
  r->left = -1;
  if (field(r->head, "\r\ntransfer-encoding: chunked", NULL)) r->state = SIZE;
  else r->state = !field(r->head, "\r\ncontent-length:", &r->left) || r->left ? BODY : OVER;
  return used;
}

static void read_body(struct response *r, const char *p, size_t length) {
  const char *end = p + length;
  size_t kept = length < sizeof r->tail ? length : sizeof r->tail;
  memmove(r->tail, r->tail + kept, sizeof r->tail - kept);
  memcpy(r->tail + sizeof r->tail - kept, end - kept, kept);
  while (p < end) {
    if (!r->digits) {
      p = memchr(p, '@', end - p);
      if (!p) return;
      p++, r->digits = 1, r->stamp = 0;
    }
    for (; p < end && r->digits <= STAMP_DIGITS; p++, r->digits++)
      r->stamp = r->stamp * 10 + *p - '0';
    if (r->digits <= STAMP_DIGITS) return;
    r->digits = 0, r->stamps++;
    r->on_stamp(r);
  }
}

static void read_size(struct response *r, char byte) {
  if (byte != '\n') {
    if (r->line_length < sizeof r->line - 1) r->line[r->line_length++] = byte;
    return;
  }
  r->line[r->line_length] = 0;
  r->line_length = 0;
  r->left = strtol(r->line, NULL, 16);
  r->state = r->left > 0 ? CHUNK : LAST_END;
}

// Take the next bytes until they are used up or the answer is OVER or BROKEN.
static void read_response(struct response *r, const char *data, size_t length) {
  while (length && r->state < OVER) {
    size_t used = 1;
    if (r->state == HEAD) {
      used = read_head(r, data, length);
    } else if (r->state == SIZE) {
      read_size(r, *data);
    } else if (r->state == CHUNK_END || r->state == LAST_END) {
      if (*data == '\n') r->state = r->state == LAST_END ? OVER : SIZE;
    } else {
      used = r->left >= 0 && (size_t)r->left < length ? (size_t)r->left : length;
      read_body(r, data, used);
      if (r->left > 0) r->left -= used;
      if (r->left == 0) r->state = r->state == CHUNK ? CHUNK_END : OVER;
    }
    data += used, length -= used;
  }
}

// The connection was closed.
static void close_response(struct response *r) {
  r->state = r->state == BODY && r->left < 0 ? OVER : BROKEN;
  r->is_keeping = 0;
}
