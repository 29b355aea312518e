//! Unpacks LZ4 blocks.
//!
//! Crates for LZ4 cannot stop where the output ends, which extents that are a part of their physical cluster need, and
//! images whose data is followed by padding. Source: `doc/lz4_Block_format.md` of LZ4.

use crate::gzip::OutputPart;

/// Length that further bytes continue.
const MORE: usize = 15;
/// Minimum length of a match.
const MATCH_MIN: usize = 4;

/// Unpacks a block until the output is full. Returns `None` if the data is damaged, or has another length.
pub(super) fn unpack(packed: &[u8], bytes: &mut [u8], output: OutputPart) -> Option<()> {
    let mut rest = packed;
    let mut at = 0_usize;
    loop {
        let token = usize::from(byte(&mut rest)?);
        let literals = length(token >> 4, &mut rest)?;
        let room = bytes.len().checked_sub(at)?;
        let count = match output {
            OutputPart::Start => literals.min(room),
            OutputPart::Whole => literals,
        };
        let (from, after) = rest.split_at_checked(count)?;
        let end = at.checked_add(count)?;
        bytes.get_mut(at..end)?.copy_from_slice(from);
        (rest, at) = (after, end);
        // The last sequence has no match.
        match output {
            OutputPart::Start if at == bytes.len() => return Some(()),
            OutputPart::Whole if rest.is_empty() => return (at == bytes.len()).then_some(()),
            _ => {}
        }
        let distance = usize::from(u16::from_le_bytes([byte(&mut rest)?, byte(&mut rest)?]));
        let count = length(token & MORE, &mut rest)?.checked_add(MATCH_MIN)?;
        let room = bytes.len().checked_sub(at)?;
        let count = match output {
            OutputPart::Start => count.min(room),
            OutputPart::Whole => count,
        };
        repeat(bytes, at, distance, count)?;
        at = at.checked_add(count)?;
        if output == OutputPart::Start && at == bytes.len() {
            return Some(());
        }
    }
}

fn byte(rest: &mut &[u8]) -> Option<u8> {
    let (first, after) = rest.split_first()?;
    *rest = after;
    Some(*first)
}

/// Returns a length whose first part is in a token.
fn length(first: usize, rest: &mut &[u8]) -> Option<usize> {
    let mut sum = first;
    if first == MORE {
        loop {
            let more = byte(rest)?;
            sum = sum.checked_add(more.into())?;
            if more != u8::MAX {
                break;
            }
        }
    }
    Some(sum)
}

/// Repeats bytes before `at`. The source may overlap the copy.
fn repeat(bytes: &mut [u8], at: usize, distance: usize, count: usize) -> Option<()> {
    let from = at.checked_sub(distance).filter(|_| distance != 0)?;
    let end = at.checked_add(count).filter(|end| *end <= bytes.len())?;
    let mut to = at;
    // Each round doubles the number of bytes that repeat.
    while to < end {
        let len = to.checked_sub(from)?.min(end.checked_sub(to)?);
        bytes.copy_within(from..from.checked_add(len)?, to);
        to = to.checked_add(len)?;
    }
    Some(())
}
