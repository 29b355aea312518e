//! What is fetched before anybody wants it: what a reader that reads on will want next, and what a trace has.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::time::Duration;

/// So many readers are remembered.
const STREAMS: usize = 16;
/// The most units that are brought ahead of a reader: 8 MiB of a device, which are some 3 of a blob.
const WINDOW_MAX: usize = 128;
/// The first units ahead of one that has just been found to read on.
const WINDOW_FIRST: usize = 4;
/// Two reads with fewer units between them are of one reader.
const NEAR: usize = 8;

/// The most units around a read that are brought with it: 1 MiB of a device.
const BLOCK_MAX: usize = 16;
/// So many requests are remembered.
const SAMPLES: usize = 32;
/// With fewer, nothing is known of the way to the source.
const SAMPLES_MIN: usize = 6;
/// Then requests are believed to take as long as so many bytes: 5 ms at 40 MB/s.
const FREE_BYTES: f64 = 200_000.0;

/// The most bytes of a blob in one request for what nobody waits for: so long a reader's own request may wait behind it.
const PIECE_MAX: u64 = 1 << 20;
/// Runs of a trace with so many bytes of blobs are brought in the order of the device: neighbours come with one request.
const BATCH: u64 = 4 << 20;

/// Where readers of a device read on.
#[derive(Debug, Default)]
pub(super) struct Streams(VecDeque<Stream>);

#[derive(Debug)]
struct Stream {
    /// The unit behind the last that was wanted or brought.
    end: usize,
    /// Units ahead of it.
    window: usize,
}

impl Streams {
    /// Notes that a reader waits for these units, and gets all up to `until` with them. Tells how many behind its own it is
    /// going to want.
    pub(super) fn read(&mut self, units: &Range<usize>, until: usize) -> usize {
        let follows = |it: &Stream| {
            // Also when it wants again what came with its last read.
            (it.end..=it.end + NEAR).contains(&units.start) && units.end > it.end
        };
        let window = match self.0.iter().position(follows).and_then(|at| self.0.remove(at)) {
            None => 0,
            Some(before) => (before.window * 2).clamp(WINDOW_FIRST, WINDOW_MAX),
        };
        self.0.truncate(STREAMS - 1);
        self.0.push_front(Stream { end: until.max(units.end + window), window });
        window
    }
}

/// How long requests take.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Bytes and seconds.
    samples: VecDeque<(f64, f64)>,
}

impl Pace {
    /// Notes a request.
    pub(super) fn took(&mut self, bytes: u64, time: Duration) {
        self.samples.truncate(SAMPLES - 1);
        // Exact up to 2^32, and no request is larger.
        let bytes = f64::from(u32::try_from(bytes).unwrap_or(u32::MAX));
        self.samples.push_front((bytes, time.as_secs_f64()));
    }

    /// How many bytes take as long as a request without any: to ask for fewer saves little time. The line through all
    /// requests, by least squares, has both.
    pub(super) fn free_bytes(&self) -> f64 {
        if self.samples.len() < SAMPLES_MIN {
            return FREE_BYTES;
        }
        let count = f64::from(u32::try_from(self.samples.len()).unwrap_or(u32::MAX));
        let mean = |of: fn(&(f64, f64)) -> f64| self.samples.iter().map(of).sum::<f64>() / count;
        let (bytes, time) = (mean(|it| it.0), mean(|it| it.1));
        let mut spread = (0.0, 0.0);
        for (of, took) in &self.samples {
            spread.0 += (of - bytes) * (of - bytes);
            spread.1 += (of - bytes) * (took - time);
        }
        let slope = spread.1 / spread.0;
        if slope.is_nan() || slope <= 0.0 {
            // Larger ones took no longer.
            return f64::INFINITY;
        }
        ((time - slope * bytes) / slope).max(0.0)
    }
}

/// The units around these that are worth bringing with them, of which each has so many bytes in its blob: a block that begins
/// at a multiple of its own length.
pub(super) fn block(units: &Range<usize>, free_bytes: f64, unit_bytes: f64) -> Range<usize> {
    let is_free = |length: &usize| {
        f64::from(u32::try_from(*length).unwrap_or(u32::MAX)) * unit_bytes <= free_bytes
    };
    let lengths = [BLOCK_MAX, BLOCK_MAX / 2, BLOCK_MAX / 4];
    let length = lengths.into_iter().find(is_free).unwrap_or(1);
    units.start / length * length..units.end.next_multiple_of(length)
}

/// The most units of a trace that are brought: 4 GiB of devices. What a program reads later is not waited for at its start.
const TRACE_MAX: usize = 1 << 16;

/// The units of a trace that there are, in its order. `runs` have numbers of units, and how many a device has.
pub(super) fn bounded<T>(
    runs: impl IntoIterator<Item = (T, Range<usize>, usize)>,
) -> impl Iterator<Item = (T, Range<usize>)> {
    let mut left = TRACE_MAX;
    runs.into_iter().map_while(move |(device, units, most)| {
        let start = units.start.min(most);
        let end = units.end.clamp(start, most).min(start.saturating_add(left));
        let may_go_on = left > 0;
        left -= end - start;
        may_go_on.then_some((device, start..end))
    })
}

/// Spans of the blob of one of several devices, by its place. Requests for spans have none in common, as those for units would.
pub(super) type SpanRun = (usize, Range<usize>);

/// Requests for the spans of a trace: those that are wanted first come first, and neighbours with them. `cost` tells how many
/// bytes some spans have.
pub(super) fn requests(
    runs: impl IntoIterator<Item = SpanRun>,
    cost: impl Fn(&SpanRun) -> u64,
) -> Vec<SpanRun> {
    let (mut seen, mut batch, mut bytes) = (BTreeSet::new(), BTreeSet::new(), 0);
    let mut all = Vec::new();
    for (device, spans) in runs {
        let new: Vec<_> = spans.filter(|it| seen.insert((device, *it))).collect();
        bytes += new.iter().map(|it| cost(&(device, *it..it + 1))).sum::<u64>();
        batch.extend(new.into_iter().map(|it| (device, it)));
        if bytes >= BATCH {
            all.extend(merged(&std::mem::take(&mut batch), &cost));
            bytes = 0;
        }
    }
    all.extend(merged(&batch, &cost));
    all
}

/// Neighbours together, up to [`PIECE_MAX`].
fn merged(spans: &BTreeSet<(usize, usize)>, cost: &impl Fn(&SpanRun) -> u64) -> Vec<SpanRun> {
    let mut all: Vec<SpanRun> = Vec::new();
    for (device, span) in spans {
        if let Some((before, range)) = all.last_mut()
            && before == device
            && range.end == *span
            && cost(&(*device, range.start..span + 1)) <= PIECE_MAX
        {
            range.end = span + 1;
            continue;
        }
        all.push((*device, *span..span + 1));
    }
    all
}

/// Requests for spans that follow one another.
pub(super) fn in_pieces(
    spans: Range<usize>,
    cost: impl Fn(&Range<usize>) -> u64,
) -> Vec<Range<usize>> {
    let all = spans.map(|it| (0, it)).collect();
    merged(&all, &|(_, spans)| cost(spans)).into_iter().map(|it| it.1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_grow_while_a_reader_reads_on() {
        let mut streams = Streams::default();
        let mut read = |units: Range<usize>| streams.read(&units, units.end);
        assert_eq!(read(10..12), 0);
        assert_eq!(read(12..14), 4);
        // What came ahead was read without waiting.
        assert_eq!(read(18..20), 8);
        // Another reader, in between.
        assert_eq!(read(1000..1002), 0);
        assert_eq!(read(28..30), 16);
        assert_eq!(read(1002..1003), 4);
        // A jump, and a jump back.
        assert_eq!(read(500..501), 0);
        assert_eq!(read(490..491), 0);
        let mut end = 501;
        for _ in 0..20 {
            end += 1 + read(end..end + 1);
        }
        assert_eq!(read(end..end + 1), WINDOW_MAX);
        // It reads on behind what came with its last read.
        assert_eq!(streams.read(&(5000..5001), 5016), 0);
        assert_eq!(streams.read(&(5016..5017), 5020), WINDOW_FIRST);
        assert_eq!(streams.read(&(5021..5022), 5022), 2 * WINDOW_FIRST);
    }

    #[test]
    fn more_is_asked_for_where_a_request_is_dear() {
        let free = |request: f64, second: f64| {
            let mut pace = Pace::default();
            for number in 1..=20_u64 {
                let bytes = number * 7 % 11 * 30_000;
                let bytes_of = f64::from(u32::try_from(bytes).unwrap());
                pace.took(bytes, Duration::from_secs_f64(request + bytes_of / second));
            }
            pace.free_bytes()
        };
        // 20 ms of 100 MB/s, and 5 ms of 25 MB/s.
        assert!((free(0.02, 1e8) - 2e6).abs() < 1000.0);
        assert!((free(0.005, 2.5e7) - 125e3).abs() < 1000.0);
        assert!((Pace::default().free_bytes() - FREE_BYTES).abs() < 1.0);
        assert_eq!(block(&(37..38), 2e6, 25e3), 32..48);
        assert_eq!(block(&(37..38), 210e3, 25e3), 32..40);
        assert_eq!(block(&(37..38), 125e3, 25e3), 36..40);
        assert_eq!(block(&(37..39), 50e3, 25e3), 37..39);
        assert_eq!(block(&(47..50), f64::INFINITY, 25e3), 32..64);
    }

    #[test]
    fn a_trace_without_end_has_one() {
        let runs = [('a', 3..usize::MAX, 5), ('b', 7..9, 5), ('c', 0..usize::MAX, usize::MAX)];
        let got: Vec<_> = bounded(runs.clone()).collect();
        assert_eq!(got, [('a', 3..5), ('b', 5..5), ('c', 0..TRACE_MAX - 2)]);
        let again = runs.iter().cloned().cycle().take(1000);
        let units: usize = bounded(again).map(|it| it.1.len()).sum();
        assert_eq!(units, TRACE_MAX);
    }

    #[test]
    fn many_readers_are_remembered_and_no_more() {
        let mut streams = Streams::default();
        for reader in 0..40 {
            assert_eq!(streams.read(&(reader * 1000..reader * 1000 + 1), 0), 0);
        }
        assert_eq!(streams.0.len(), STREAMS);
        assert_eq!(streams.read(&(39_001..39_002), 0), WINDOW_FIRST);
        assert_eq!(streams.read(&(1..2), 0), 0);
    }

    #[test]
    fn a_trace_is_fetched_in_its_order_with_neighbours_together() {
        let of = |spans: &Range<usize>, kilobytes: u64| spans.len() as u64 * (kilobytes << 10);
        let packed = |it: &SpanRun| of(&it.1, 200);
        let made = requests([(0, 7..9), (1, 3..4), (0, 5..7), (0, 8..9), (1, 2..4)], packed);
        assert_eq!(made, [(0, 5..9), (1, 2..4)]);
        // At most 5 of them in a request.
        let made = requests([(0, 0..12)], packed);
        assert_eq!(made, [(0, 0..5), (0, 5..10), (0, 10..12)]);
        // What is wanted much later comes later, though it is a neighbour.
        let made = requests([(0, 10..60), (0, 9..10)], packed);
        assert_eq!((made[0].clone(), made.last().cloned()), ((0, 10..15), Some((0, 9..10))));
        // None comes twice.
        let made = requests([(0, 0..3), (0, 2..4), (0, 3..4), (0, 1..2)], packed);
        assert_eq!(made, [(0, 0..4)]);
        assert!(requests([], packed).is_empty());
        // One that is larger than a request is one.
        assert_eq!(requests([(0, 1..3)], |it| of(&it.1, 1 << 20)), [(0, 1..2), (0, 2..3)]);
        assert_eq!(in_pieces(3..10, |it| of(it, 400)), [3..5, 5..7, 7..9, 9..10]);
    }
}
