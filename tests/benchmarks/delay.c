// A TCP relay that adds a round-trip time: delay SERVER_PORT MICROSECONDS.
//
// Bytes from the client reach the server MICROSECONDS later, and the first bytes of a connection
// twice as late, because a real handshake takes a round trip too. Bytes from the server are passed
// on at once. One thread with epoll; it prints its port, and ends when its standard input does.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { SIZE = 1 << 18, EVENTS = 256 };

struct end {
  int fd;
  struct end *other;
  char *buffer;  // From the server, not yet written to the client.
  size_t first, last;
  int is_client, used, closed, waiting;  // `waiting`: number of chunks in the queue.
};

struct chunk {
  struct chunk *next;
  struct end *to;
  long long due;
  size_t size;  // 0: the client has closed.
  char bytes[];
};

static struct chunk *head, *tail;
static int poll_fd, timer_fd;

static long long now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void die(const char *what) {
  perror(what);
  exit(1);
}

static void watch(struct end *e, int operation, unsigned events) {
  struct epoll_event event = {.events = events, .data.ptr = e};
  epoll_ctl(poll_fd, operation, e->fd, &event);
}

static void set_timer(void) {
  struct itimerspec when = {0};
  if (head) {
    when.it_value.tv_sec = head->due / 1000000000;
    when.it_value.tv_nsec = head->due % 1000000000 + 1;
  }
  timerfd_settime(timer_fd, TFD_TIMER_ABSTIME, &when, NULL);
}

// Both ends are freed once none is open and no chunk refers to them.
static void close_both(struct end *e) {
  struct end *client = e->is_client ? e : e->other, *server = client->other;
  if (!client->closed) close(client->fd);
  if (!server->closed) close(server->fd);
  client->closed = server->closed = 1;
  if (server->waiting) return;
  free(server->buffer);
  free(server);
  free(client);
}

static void enqueue(struct end *from, const char *bytes, size_t size, long long delay) {
  struct chunk *c = malloc(sizeof *c + size);
  c->next = NULL;
  c->to = from->other;
  c->due = now() + (from->used ? delay : 2 * delay);
  // A later chunk of a connection must not overtake its first one.
  if (tail && c->due < tail->due && from->used) c->due = tail->due;
  from->used = 1;
  c->size = size;
  memcpy(c->bytes, bytes, size);
  c->to->waiting++;
  struct chunk **place = &head;
  if (tail && tail->due <= c->due) place = &tail->next;
  else while (*place && (*place)->due <= c->due) place = &(*place)->next;
  c->next = *place;
  *place = c;
  if (!c->next) tail = c;
  if (head == c) set_timer();
}

static void deliver(void) {
  long long time = now();
  while (head && head->due <= time) {
    struct chunk *c = head;
    struct end *to = c->to;
    head = c->next;
    if (!head) tail = NULL;
    to->waiting--;
    if (to->closed) {
      if (!to->waiting) close_both(to);
    } else if (!c->size) {
      close_both(to);
    } else {
      for (size_t done = 0; done < c->size;) {  // Requests are small: they fit into the socket.
        ssize_t n = send(to->fd, c->bytes + done, c->size - done, MSG_NOSIGNAL);
        if (n < 0 && errno == EAGAIN) { usleep(50); continue; }
        if (n < 0) { close_both(to); break; }
        done += n;
      }
    }
    free(c);
  }
  set_timer();
}

// Writes what the server has sent; reads more only once all of it is written.
static int flush(struct end *server) {
  struct end *client = server->other;
  while (server->first < server->last) {
    ssize_t n = send(client->fd, server->buffer + server->first, server->last - server->first,
                     MSG_NOSIGNAL);
    if (n < 0 && errno == EAGAIN) {
      watch(client, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
      watch(server, EPOLL_CTL_MOD, 0);
      return 0;
    }
    if (n < 0) return -1;
    server->first += n;
  }
  server->first = server->last = 0;
  return 1;
}

static struct end *new_end(int fd, int is_client) {
  struct end *e = calloc(1, sizeof *e);
  int yes = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  e->fd = fd;
  e->is_client = is_client;
  if (!is_client) e->buffer = malloc(SIZE);
  return e;
}

static void handle(struct end *e, unsigned events, long long delay) {
  static char bytes[1 << 16];
  if (e->closed) return;
  if (e->is_client) {
    if (events & EPOLLOUT) {
      int done = flush(e->other);
      if (done < 0) { close_both(e); return; }
      if (done) {
        watch(e, EPOLL_CTL_MOD, EPOLLIN);
        watch(e->other, EPOLL_CTL_MOD, EPOLLIN);
      }
    }
    if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR))) return;
    ssize_t n = recv(e->fd, bytes, sizeof bytes, 0);
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) watch(e, EPOLL_CTL_DEL, 0);
    enqueue(e, bytes, n > 0 ? n : 0, delay);
    return;
  }
  ssize_t n = recv(e->fd, e->buffer, SIZE, 0);
  if (n < 0 && errno == EAGAIN) return;
  if (n <= 0) { close_both(e); return; }
  e->last = n;
  if (flush(e) < 0) close_both(e);
}

int main(int argc, char **argv) {
  if (argc != 3) return 2;
  struct sockaddr_in server = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1]))};
  server.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  long long delay = atoll(argv[2]) * 1000;
  int listening = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  struct sockaddr_in own = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof own;
  if (bind(listening, (struct sockaddr *)&own, sizeof own) || listen(listening, 4096)) die("bind");
  getsockname(listening, (struct sockaddr *)&own, &length);
  printf("%d\n", ntohs(own.sin_port));
  fflush(stdout);
  poll_fd = epoll_create1(0);
  timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
  struct end accepting = {.fd = listening}, timing = {.fd = timer_fd}, input = {.fd = 0};
  watch(&accepting, EPOLL_CTL_ADD, EPOLLIN);
  watch(&timing, EPOLL_CTL_ADD, EPOLLIN);
  watch(&input, EPOLL_CTL_ADD, EPOLLIN);
  for (struct epoll_event events[EVENTS];;) {
    int count = epoll_wait(poll_fd, events, EVENTS, -1);
    for (int i = 0; i < count; i++) {
      struct end *e = events[i].data.ptr;
      if (e == &input) return 0;
      if (e == &timing) continue;
      if (e != &accepting) {
        struct end *other = e->other;
        // An event of an end that an earlier event has freed is dropped.
        handle(e, events[i].events, delay);
        for (int j = i + 1; j < count; j++)
          if (events[j].data.ptr == other || events[j].data.ptr == e) events[j].data.ptr = &timing;
        continue;
      }
      int fd;
      while ((fd = accept4(listening, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        int to = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(to, (struct sockaddr *)&server, sizeof server)) { close(to); close(fd); continue; }
        struct end *client = new_end(fd, 1), *remote = new_end(to, 0);
        client->other = remote;
        remote->other = client;
        watch(client, EPOLL_CTL_ADD, EPOLLIN);
        watch(remote, EPOLL_CTL_ADD, EPOLLIN);
      }
    }
    unsigned long long ticks;
    if (read(timer_fd, &ticks, sizeof ticks) < 0 && errno != EAGAIN) die("timer");
    deliver();
  }
}
