// What is due when: a wheel of slots of a millisecond each.
#pragma once
#include "base.h"

enum { SLOTS = 1024, SLOT_NS = 1000000 };

struct alarm {
  struct alarm *next, **link;  // in its slot; link == NULL: not set
  long due_ns;
};

static struct alarm *wheel[SLOTS];
static long wheel_slot, alarms;  // the slot that was turned to last, and how many are set

static void clear_alarm(struct alarm *a) {
  if (!a->link) return;
  *a->link = a->next;
  if (a->next) a->next->link = a->link;
  a->link = NULL;
  alarms--;
}

// For a->due_ns, in a slot that is still to come.
static void set_alarm(struct alarm *a) {
  a->link = &wheel[a->due_ns / SLOT_NS % SLOTS];
  a->next = *a->link;
  if (a->next) a->next->link = &a->next;
  *a->link = a;
  alarms++;
}

// Call `ring` with each that is due. It may set and clear any.
static void turn_wheel(void (*ring)(struct alarm *)) {
  for (long now = now_ns() / SLOT_NS; wheel_slot < now;) {
    struct alarm *due = wheel[++wheel_slot % SLOTS];
    wheel[wheel_slot % SLOTS] = NULL;
    if (due) due->link = &due;
    while (due) {
      struct alarm *a = due;
      clear_alarm(a);
      if (a->due_ns / SLOT_NS > wheel_slot) set_alarm(a);  // in a later turn of the wheel
      else ring(a);
    }
  }
}
