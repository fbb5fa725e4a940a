// Command testpod is the one program of the test cluster's own images: it holds a pod's
// namespaces (pause), and stands in for whatever a test wants to run in a pod.
//
//	testpod pause
//	testpod serve [PORT]        HTTP: / the pod's name, /env its environment, /burn?ms=N uses CPU,
//	                            /fail?text=T ends with it
//	testpod get URL [TIMEOUT]   prints the answer's body; status 1 unless it is a 2xx
//	testpod burn                uses one CPU until it is stopped
//	testpod fail [TEXT]         prints the text and ends with status 1
//	testpod worker ...          stands in for an engine: prints its environment, ends with an error
//	                            when something is missing in it, else answers probes;
//	                            STAND_IN_BURNS=1: and uses CPU; STAND_IN_FAILS=TEXT: ends with it
//	testpod router ...          stands in for a router: answers probes
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

func main() {
	argv := append(os.Args[1:], "", "", "")
	var err error
	switch argv[0] {
	case "pause":
		pause()
	case "serve":
		err = serve(or(argv[1], "8080"))
	case "get":
		err = get(argv[1], or(argv[2], "5s"))
	case "burn":
		burn(time.Duration(1<<63 - 1))
	case "worker":
		err = worker()
	case "router":
		err = serve("10001")
	case "fail":
		err = errors.New(or(argv[1], "told to fail"))
	default:
		err = fmt.Errorf("testpod: no command %q", argv[0])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// worker checks what an engine reads from its pod.
func worker() error {
	if text := os.Getenv("STAND_IN_FAILS"); text != "" {
		return errors.New(text)
	}
	variables := os.Environ()
	slices.Sort(variables)
	fmt.Println(strings.Join(variables, "\n"))
	needed := []string{
		"XPYD_ROLE", "XPYD_POD_IP", "XPYD_HTTP_PORT", "XPYD_KV_PORT", "XPYD_DISCOVERY",
		"XPYD_KV_KEY_FILE", "XPYD_FLEET", "XPYD_POOL", "XPYD_INSTANCE", "XPYD_REVISION",
	}
	for _, name := range needed {
		if os.Getenv(name) == "" {
			return fmt.Errorf("testpod: %s is not set", name)
		}
	}
	if key, err := os.ReadFile(os.Getenv("XPYD_KV_KEY_FILE")); err != nil {
		return err
	} else if len(strings.TrimSpace(string(key))) != 64 {
		return fmt.Errorf("testpod: the KV key has %d characters", len(key))
	}
	for _, folder := range []string{"/tmp", "/dev/shm"} {
		if err := os.WriteFile(folder+"/written", nil, 0o600); err != nil {
			return err
		}
	}
	if os.Getenv("STAND_IN_BURNS") == "1" {
		go burn(time.Duration(1<<63 - 1))
	}
	return serve(os.Getenv("XPYD_HTTP_PORT"))
}

// pause waits to be stopped and reaps what dies meanwhile.
func pause() {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	for received := range signals {
		if received != syscall.SIGCHLD {
			return
		}
		for {
			if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); pid <= 0 || err != nil {
				break
			}
		}
	}
}

// serve answers until it is asked to stop, and lets the answers under way finish.
func serve(port string) error {
	hostname, err := os.Hostname()
	if err != nil {
		return err
	}
	http.HandleFunc("/", func(answer http.ResponseWriter, request *http.Request) {
		fmt.Println(request.Method, request.URL)
		fmt.Fprintln(answer, hostname)
	})
	http.HandleFunc("/env", func(answer http.ResponseWriter, _ *http.Request) {
		variables := os.Environ()
		slices.Sort(variables)
		fmt.Fprintln(answer, strings.Join(variables, "\n"))
	})
	http.HandleFunc("/burn", func(answer http.ResponseWriter, request *http.Request) {
		milliseconds, _ := strconv.Atoi(request.URL.Query().Get("ms"))
		burn(time.Duration(milliseconds) * time.Millisecond)
		fmt.Fprintln(answer, hostname)
	})
	failed := make(chan error, 1)
	http.HandleFunc("/fail", func(answer http.ResponseWriter, request *http.Request) {
		fmt.Fprintln(answer, hostname)
		select {
		case failed <- errors.New(or(request.URL.Query().Get("text"), "told to fail")):
		default:
		}
	})
	server := &http.Server{Addr: ":" + port}
	stop, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- server.ListenAndServe() }()
	select {
	case err := <-ended:
		return err
	case err := <-failed:
		return errors.Join(server.Shutdown(context.Background()), err)
	case <-stop.Done():
		return server.Shutdown(context.Background())
	}
}

func get(url, timeout string) error {
	limit, err := time.ParseDuration(timeout)
	if err != nil {
		return err
	}
	client := http.Client{Timeout: limit}
	answer, err := client.Get(url)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if _, err := io.Copy(os.Stdout, answer.Body); err != nil {
		return err
	}
	if answer.StatusCode/100 != 2 {
		return errors.New(answer.Status)
	}
	return nil
}

func burn(span time.Duration) {
	end := time.Now().Add(span)
	for time.Now().Before(end) {
	}
}

func or(value, otherwise string) string {
	if value == "" {
		return otherwise
	}
	return value
}
