//! Entry point for fuzzers of the index.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use super::{Builder, Index, IndexError};

/// Reads a file as the index of a device, for fuzzers. An accepted index must be consistent, and the same after it is
/// encoded and read again.
///
/// # Errors
/// If the file cannot be read.
///
/// # Panics
/// If an accepted index is inconsistent.
pub fn exercise_data_index(file: &File) -> io::Result<()> {
    let size = file.metadata()?.len();
    let index = match Index::read(file, size) {
        Ok(index) => index,
        Err(IndexError::Damaged(_)) => return Ok(()),
        Err(IndexError::Read(error)) => return Err(error),
    };
    let mut builder = Builder::default();
    for entry in &index.entries {
        assert!(entry.until() <= index.header.bytes);
        assert!(index.places(&entry.id).contains(entry));
        if entry.size > 0 {
            assert_eq!(index.at(entry.offset), Some(entry));
            assert_eq!(index.before(entry.until().saturating_sub(1)), Some(entry));
        }
        builder.add(*entry);
    }
    for record in &index.records {
        assert_eq!(index.record(&record.id), Some(record));
        assert_eq!(index.record_of(&record.pieces), Some(record));
        assert_eq!(record.pieces.iter().map(|it| it.len).sum::<u64>(), record.size);
        builder.add_record(record.clone());
    }
    let encoded = builder.encode(&index.header)?;
    file.set_len(0)?;
    file.write_all_at(&encoded, 0)?;
    let again = Index::read(file, file.metadata()?.len()).expect("it was written just now");
    assert!(again.has_all_of(&index) || index.header.dropped > 0);
    assert_eq!((again.entries.len(), &again.records), (index.entries.len(), &index.records));
    Ok(())
}
