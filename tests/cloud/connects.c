// For LD_PRELOAD: appends the address of every connection to the file CONNECT_LOG, and refuses
// those that leave this machine.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

int connect(int fd, const struct sockaddr *address, socklen_t length) {
  static int (*real)(int, const struct sockaddr *, socklen_t);
  if (!real) real = dlsym(RTLD_NEXT, "connect");
  char text[INET6_ADDRSTRLEN] = "";
  if (address->sa_family == AF_INET)
    inet_ntop(AF_INET, &((const struct sockaddr_in *)address)->sin_addr, text, sizeof text);
  else if (address->sa_family == AF_INET6)
    inet_ntop(AF_INET6, &((const struct sockaddr_in6 *)address)->sin6_addr, text, sizeof text);
  else
    return real(fd, address, length);  // A socket of this machine.
  const char *path = getenv("CONNECT_LOG");
  if (path) {
    char line[64];
    int size = snprintf(line, sizeof line, "%s\n", text);
    int log = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (log >= 0) {
      if (write(log, line, size) < 0) abort();
      close(log);
    }
  }
  if (strncmp(text, "127.", 4) && strcmp(text, "::1")) {
    errno = ECONNREFUSED;
    return -1;
  }
  return real(fd, address, length);
}
