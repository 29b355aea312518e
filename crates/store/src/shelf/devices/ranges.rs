//! Byte ranges that may overlap, with fast lookup of overlaps.

/// Ranges, each with its first byte and the byte after its end.
#[derive(Debug, Default)]
pub(crate) struct Ranges {
    sorted: Vec<(u64, u64)>,
    /// For each range, the greatest end of this range and all earlier ranges.
    reaches: Vec<u64>,
}

impl Ranges {
    pub(crate) fn new(mut ranges: Vec<(u64, u64)>) -> Self {
        ranges.sort_unstable();
        let mut reach = 0;
        let reaches = ranges.iter().map(|range| {
            reach = reach.max(range.1);
            reach
        });
        let reaches = reaches.collect();
        Self { sorted: ranges, reaches }
    }

    /// Whether a range overlaps `from..until`.
    pub(crate) fn meet(&self, from: u64, until: u64) -> bool {
        let before = self.sorted.partition_point(|range| range.0 < until);
        let last = before.checked_sub(1).and_then(|last| self.reaches.get(last));
        from < until && last.is_some_and(|reach| *reach > from)
    }

    /// Returns the indexes of the ranges that overlap `from..until`, in descending order.
    pub(crate) fn meeting(&self, from: u64, until: u64) -> impl Iterator<Item = usize> + use<'_> {
        self.candidates(from, until).filter(move |at| self.sorted[*at].1 > from)
    }

    /// Returns the indexes of the ranges that `meeting` compares. All ranges before them end at `from` or earlier.
    fn candidates(&self, from: u64, until: u64) -> impl Iterator<Item = usize> + use<'_> {
        let before = self.sorted.partition_point(|range| range.0 < until);
        let before = if from < until { before } else { 0 };
        (0..before).rev().take_while(move |at| self.reaches[*at] > from)
    }

    /// Returns the ranges, sorted.
    pub(crate) fn into_sorted(self) -> Vec<(u64, u64)> {
        self.sorted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `fsck` looks up each range of each image, and every object may be damaged.
    #[test]
    fn ranges_that_are_not_met_are_not_looked_at() {
        const COUNT: u64 = 10_000;
        let ranges = Ranges::new((0..COUNT).map(|it| (it * 2, it * 2 + 1)).collect());
        let looked_at = |from: u64| ranges.candidates(from, from + 1).count();
        assert_eq!((0..COUNT).map(|it| looked_at(it * 2 + 1)).sum::<usize>(), 0);
        assert_eq!((0..COUNT).map(|it| looked_at(it * 2)).max(), Some(1));
    }

    #[test]
    fn what_meets_ranges() {
        let ranges = Ranges::new(vec![(10, 20), (5, 40), (50, 60)]);
        let cases = [
            ((0, 5), false),
            ((0, 6), true),
            ((25, 26), true),
            ((39, 50), true),
            ((40, 50), false),
            ((59, 99), true),
            ((60, 99), false),
            ((30, 30), false),
        ];
        for ((from, until), expect) in cases {
            assert_eq!(ranges.meet(from, until), expect, "{from}..{until}");
            assert_eq!(ranges.meeting(from, until).next().is_some(), expect, "{from}..{until}");
        }
        let all = |from, until| ranges.meeting(from, until).collect::<Vec<_>>();
        assert_eq!(all(19, 20), [1, 0]);
        assert_eq!(all(20, 51), [2, 0]);
        assert_eq!(all(40, 99), [2]);
    }
}
