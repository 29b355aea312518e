//! Plans prefetching: for sequential readers, for the neighbourhood of reads, and from traces.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::time::Duration;

/// Largest number of sequential readers that are remembered.
const STREAMS: usize = 16;
/// Largest prefetch window in units: 8 MiB of a device, which is about 3 MiB of a blob.
const WINDOW_MAX: usize = 128;
/// First prefetch window of a new sequential reader, in units.
const WINDOW_FIRST: usize = 4;
/// Reads at most this many units apart belong to one reader.
const NEAR: usize = 8;

/// Largest block around a read that is fetched with it, in units: 1 MiB of a device.
const BLOCK_MAX: usize = 16;
/// Number of requests that are remembered.
const SAMPLES: usize = 32;
/// With fewer requests, the speed of the source counts as unknown.
const SAMPLES_MIN: usize = 6;
/// Default of [`Pace::free_bytes`]: 5 ms at 40 MB/s.
const FREE_BYTES: f64 = 200_000.0;

/// Largest prefetch request in bytes of a blob, because a reader's request may have to wait for it.
const PIECE_MAX: u64 = 1 << 20;
/// Parts of a trace are sorted in batches with this many bytes of blobs, by their location in the device, so that
/// neighbours share a request.
const BATCH: u64 = 4 << 20;

/// The positions of a device's sequential readers.
#[derive(Debug, Default)]
pub(in crate::lazy) struct Streams(VecDeque<Stream>);

#[derive(Debug)]
struct Stream {
    /// The unit behind the last one that was read or prefetched.
    end: usize,
    /// The prefetch window, in units.
    window: usize,
}

impl Streams {
    /// Records that a reader waits for `units` and gets all units up to `until` with them. Returns the number of units
    /// behind these that should be prefetched.
    pub(in crate::lazy) fn read(&mut self, units: &Range<usize>, until: usize) -> usize {
        let follows = |it: &Stream| {
            // A read also continues the sequence of a reader if it begins with units that were fetched with the
            // reader's last read.
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

/// The duration of requests to a source.
#[derive(Debug, Default)]
pub(in crate::lazy) struct Pace {
    /// Bytes and seconds of each request.
    samples: VecDeque<(f64, f64)>,
}

impl Pace {
    /// Records a request.
    pub(in crate::lazy) fn took(&mut self, bytes: u64, time: Duration) {
        self.samples.truncate(SAMPLES - 1);
        // Exact below 2^32, and requests are smaller.
        let bytes = f64::from(u32::try_from(bytes).unwrap_or(u32::MAX));
        self.samples.push_front((bytes, time.as_secs_f64()));
    }

    /// Returns the number of bytes whose transfer takes as long as an empty request. Requests for fewer bytes save
    /// little time. The number is computed from a least-squares line through all requests.
    pub(in crate::lazy) fn free_bytes(&self) -> f64 {
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
            // Larger requests took no longer.
            return f64::INFINITY;
        }
        ((time - slope * bytes) / slope).max(0.0)
    }
}

/// Extends units to a block that is worth fetching in one request: it begins at a multiple of its length, and takes
/// at most `free_bytes` of the blob. `unit_bytes` is the size of a unit in the blob.
pub(in crate::lazy) fn block(
    units: &Range<usize>,
    free_bytes: f64,
    unit_bytes: f64,
) -> Range<usize> {
    let is_free = |length: &usize| {
        f64::from(u32::try_from(*length).unwrap_or(u32::MAX)) * unit_bytes <= free_bytes
    };
    let lengths = [BLOCK_MAX, BLOCK_MAX / 2, BLOCK_MAX / 4];
    let length = lengths.into_iter().find(is_free).unwrap_or(1);
    units.start / length * length..units.end.next_multiple_of(length)
}

/// Largest number of prefetched units of a trace: 4 GiB of devices. The start of a program does not need units beyond
/// this limit.
const TRACE_MAX: usize = 1 << 16;

/// Cuts the runs of a trace, in its order, to existing units and to [`TRACE_MAX`]. Each run has a device, its units,
/// and the device's number of units.
pub(in crate::lazy) fn bounded<T>(
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

/// A device's index in a list, and spans of its blob. Requests are made of spans, because requests for units would
/// overlap in spans.
pub(in crate::lazy) type SpanRun = (usize, Range<usize>);

/// Plans the requests for a trace in its order, with neighbours merged. `cost` returns the bytes of spans.
pub(in crate::lazy) fn requests(
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

/// Merges neighbours, up to [`PIECE_MAX`].
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

/// Plans the requests for consecutive spans.
pub(in crate::lazy) fn in_pieces(
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
        // The prefetched units were read without waiting.
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
        // The reader continues after the units that were fetched with its last read.
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
        // A latency of 20 ms at 100 MB/s, and of 5 ms at 25 MB/s.
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
        // At most 5 spans fit into a request.
        let made = requests([(0, 0..12)], packed);
        assert_eq!(made, [(0, 0..5), (0, 5..10), (0, 10..12)]);
        // A neighbour that follows much later in the trace is not fetched with the unit.
        let made = requests([(0, 10..60), (0, 9..10)], packed);
        assert_eq!((made[0].clone(), made.last().cloned()), ((0, 10..15), Some((0, 9..10))));
        // Each span is fetched once.
        let made = requests([(0, 0..3), (0, 2..4), (0, 3..4), (0, 1..2)], packed);
        assert_eq!(made, [(0, 0..4)]);
        assert!(requests([], packed).is_empty());
        // A span that is larger than a request gets one.
        assert_eq!(requests([(0, 1..3)], |it| of(&it.1, 1 << 20)), [(0, 1..2), (0, 2..3)]);
        assert_eq!(in_pieces(3..10, |it| of(it, 400)), [3..5, 5..7, 7..9, 9..10]);
    }
}
