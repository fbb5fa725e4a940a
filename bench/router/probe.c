// The programs' readers of JSON and of HTTP as a library: their tests load it.
#define _GNU_SOURCE
#include "json.h"
#include "response.h"

struct seen {
  int state, status, is_keeping, stamps;
  long last_stamp;
  char tail[8];
};

// Where the value of a member of the object in text[:length] stands, and how long it is to *found;
// -1 where there is none.
long find_member(const char *text, long length, const char *name, long *found) {
  struct span value = json_member((struct span){text, text + length}, name);
  if (!value.at) return -1;
  *found = value.end - value.at;
  return value.at - text;
}

static struct seen *reading;

static void note_stamp(struct response *r) { reading->last_stamp = r->stamp; }

// One answer that comes in pieces, and then, perhaps, the end of the connection.
void read_pieces(const char *data, const long *ends, int count, int is_closed, struct seen *seen) {
  static struct response response;
  reading = seen;
  begin_response(&response, note_stamp);
  for (long i = 0, from = 0; i < count; from = ends[i++])
    read_response(&response, data + from, ends[i] - from);
  if (is_closed && response.state < OVER) close_response(&response);
  seen->state = response.state, seen->status = response.status;
  seen->is_keeping = response.is_keeping, seen->stamps = response.stamps;
  memcpy(seen->tail, response.tail, sizeof seen->tail);
}
