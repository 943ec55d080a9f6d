// River's program; the settings are explained in river.py, the verbs in benchmarks/program.py.

package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"golang.org/x/sys/unix"
)

const queue = "bench"

var text = strings.Repeat("x", 120)

func setting(name, otherwise string) string {
	if value := os.Getenv("BENCH_" + name); value != "" {
		return value
	}
	return otherwise
}

func number(text string) int {
	value, err := strconv.Atoi(text)
	must(err)
	return value
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// now reads the monotonic clock that all processes of the machine share.
func now() float64 {
	var at unix.Timespec
	must(unix.ClockGettime(unix.CLOCK_MONOTONIC, &at))
	return float64(at.Nano()) / 1e9
}

type Bench struct {
	N    int    `json:"n"`
	Text string `json:"text"`
}

func (Bench) Kind() string { return "bench" }

func (Bench) InsertOpts() river.InsertOpts { return river.InsertOpts{Queue: queue} }

// record keeps the numbers of the jobs that ran, in the order they began.
type record struct {
	sync.Mutex
	numbers []uint32
	times   [][2]float64
	step    int
	timed   bool
}

func (r *record) note(n int) {
	r.Lock()
	defer r.Unlock()
	r.numbers = append(r.numbers, uint32(n))
	if r.timed {
		r.times = append(r.times, [2]float64{float64(n), now()})
	}
	if count := len(r.numbers); count == 1 || count%r.step == 0 {
		fmt.Printf("mark %d %.6f\n", count, now())
	}
}

// writeAtTheEnd waits until standard input closes, writes the record and ends the process at once.
func (r *record) writeAtTheEnd() {
	_, _ = io.Copy(io.Discard, os.Stdin)
	r.Lock()
	file, err := os.Create(setting("OUT", ""))
	must(err)
	out := bufio.NewWriter(file)
	must(binary.Write(out, binary.LittleEndian, r.numbers))
	must(out.Flush())
	if r.timed {
		data, err := json.Marshal(r.times)
		must(err)
		must(os.WriteFile(setting("OUT", "")+".times", data, 0o600))
	}
	os.Exit(0)
}

type worker struct {
	river.WorkerDefaults[Bench]
	record *record
	wait   time.Duration
}

func (w *worker) Work(_ context.Context, job *river.Job[Bench]) error {
	w.record.note(job.Args.N)
	if w.wait > 0 {
		time.Sleep(w.wait)
	}
	return nil
}

func pool(ctx context.Context, size int32) *pgxpool.Pool {
	config, err := pgxpool.ParseConfig(setting("DSN", ""))
	must(err)
	config.MaxConns = size
	made, err := pgxpool.NewWithConfig(ctx, config)
	must(err)
	return made
}

func producer(ctx context.Context) *river.Client[pgx.Tx] {
	client, err := river.NewClient(riverpgxv5.New(pool(ctx, 1)), &river.Config{Logger: quiet()})
	must(err)
	return client
}

func quiet() *slog.Logger {
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))
}

func work(ctx context.Context) {
	kept := &record{step: number(setting("STEP", "1000")), timed: setting("TIMED", "") == "1"}
	workers, most, wait := river.NewWorkers(), 2000, time.Duration(0)
	if setting("MODE", "") == "io" {
		most, wait = 500, 10*time.Millisecond
	}
	river.AddWorker(workers, &worker{record: kept, wait: wait})
	client, err := river.NewClient(riverpgxv5.New(pool(ctx, 20)), &river.Config{
		FetchCooldown:     2 * time.Millisecond,
		FetchPollInterval: 20 * time.Millisecond,
		Logger:            quiet(),
		Queues:            map[string]river.QueueConfig{queue: {MaxWorkers: most}},
		Workers:           workers,
	})
	must(err)
	must(client.Start(ctx))
	kept.writeAtTheEnd()
}

func fill(ctx context.Context, count int) {
	client := producer(ctx)
	first, chunk := number(setting("FIRST", "0")), number(setting("CHUNK", "1000"))
	began := time.Now()
	for start := first; start < first+count; start += chunk {
		size := min(chunk, first+count-start)
		params := make([]river.InsertManyParams, size)
		for i := range params {
			params[i] = river.InsertManyParams{Args: Bench{N: start + i, Text: text}}
		}
		_, err := client.InsertManyFast(ctx, params)
		must(err)
	}
	fmt.Printf("filled %.6f\n", time.Since(began).Seconds())
}

func produce(ctx context.Context, count int, gap float64) {
	client := producer(ctx)
	first := number(setting("FIRST", "0"))
	sent := make([][3]float64, 0, count)
	due := time.Now()
	for n := first; n < first+count; n++ {
		time.Sleep(time.Until(due))
		called := now()
		_, err := client.Insert(ctx, Bench{N: n, Text: text}, nil)
		must(err)
		sent = append(sent, [3]float64{float64(n), called, now()})
		due = due.Add(time.Duration(gap * float64(time.Second)))
	}
	data, err := json.Marshal(sent)
	must(err)
	must(os.WriteFile(setting("OUT", ""), data, 0o600))
}

func main() {
	ctx := context.Background()
	switch verb := os.Args[1]; verb {
	case "setup":
		migrator, err := rivermigrate.New(riverpgxv5.New(pool(ctx, 2)), nil)
		must(err)
		_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
		must(err)
	case "fill":
		fill(ctx, number(os.Args[2]))
	case "produce":
		gap, err := strconv.ParseFloat(os.Args[3], 64)
		must(err)
		produce(ctx, number(os.Args[2]), gap)
	case "work":
		work(ctx)
	default:
		must(fmt.Errorf("%s is not a verb of a benchmark program", verb))
	}
}
