// Finds members of JSON objects by skipping over everything else. Strings are skipped by memchr, so
// that a prompt of 32 KiB costs next to nothing. Input that is no JSON is simply not found in.
#pragma once
#include <stdlib.h>
#include <string.h>

struct span {
  const char *at, *end;  // at == NULL: not there
};

static const char *json_blank(const char *p, const char *end) {
  while (p < end && (*p == ' ' || *p == '\n' || *p == '\r' || *p == '\t')) p++;
  return p;
}

// p is behind the opening quote; returns the closing quote or end.
static const char *json_quote(const char *p, const char *end) {
  const char *from = p;
  while ((p = memchr(p, '"', end - p)) != NULL) {
    const char *back = p;
    while (back > from && back[-1] == '\\') back--;
    if ((p - back) % 2 == 0) return p;
    p++;
  }
  return end;
}

static const char *json_value_end(const char *p, const char *end) {
  int depth = 0;
  for (; p < end; p++) {
    if (*p == '"') {
      p = json_quote(p + 1, end);
      if (p == end) return end;
    } else if (*p == '{' || *p == '[') {
      depth++;
    } else if (*p == '}' || *p == ']') {
      if (depth == 0) return p;
      depth--;
    } else if (*p == ',' && depth == 0) {
      return p;
    }
  }
  return end;
}

// The value of member `name` of the object in `object`; of several the last, as parsers have it.
static struct span json_member(struct span object, const char *name) {
  struct span found = {NULL, NULL};
  if (object.at == NULL) return found;
  size_t length = strlen(name);
  const char *end = object.end, *p = json_blank(object.at, end);
  if (p == end || *p != '{') return found;
  p++;
  for (;;) {
    p = json_blank(p, end);
    if (p == end || *p != '"') return found;
    const char *key = p + 1, *quote = json_quote(key, end);
    p = json_blank(quote + (quote < end), end);
    if (p == end || *p != ':') return found;
    p = json_blank(p + 1, end);
    const char *value_end = json_value_end(p, end);
    if ((size_t)(quote - key) == length && memcmp(key, name, length) == 0)
      found = (struct span){p, value_end};
    p = value_end;
    if (p == end || *p != ',') return found;
    p++;
  }
}

static int json_is(struct span value, const char *literal) {
  size_t length = strlen(literal);
  return value.at && (size_t)(value.end - value.at) >= length && !memcmp(value.at, literal, length);
}

// The number's whole part, or `otherwise` where there is none.
static long json_long(struct span value, long otherwise) {
  if (!value.at || value.at == value.end) return otherwise;
  char text[24];
  size_t length = value.end - value.at;
  if (length >= sizeof text) return otherwise;
  memcpy(text, value.at, length);
  text[length] = 0;
  char *rest;
  long number = strtol(text, &rest, 10);
  return rest == text ? otherwise : number;
}
