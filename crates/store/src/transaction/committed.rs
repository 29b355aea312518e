//! Amounts of a commit.

/// Amounts that a commit added and reused.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Committed {
    /// Number of objects that are new in the store.
    pub objects: u64,
    /// Size of the new objects in bytes.
    pub object_bytes: u64,
    /// Number of uses of objects that were in the store, or earlier in this import.
    pub reused: u64,
    /// Size of the reused objects in bytes, with each use counted.
    pub reused_bytes: u64,
}

impl std::ops::AddAssign for Committed {
    fn add_assign(&mut self, other: Self) {
        self.objects += other.objects;
        self.object_bytes += other.object_bytes;
        self.reused += other.reused;
        self.reused_bytes += other.reused_bytes;
    }
}

impl Committed {
    pub(super) const fn add(&mut self, size: u64) {
        self.objects += 1;
        self.object_bytes += size;
    }

    pub(super) const fn reuse(&mut self, size: u64) {
        self.reused += 1;
        self.reused_bytes += size;
    }
}
