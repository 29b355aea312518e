//! Memory use of images, with each page counted once.
//!
//! A *copy* is data in one page cache: that of an object's file, of a part of a device, or of a file of a mounted
//! image. The same data may be in memory as several copies.

mod native;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd};

use image::verity::{DeviceId, ImageId, ObjectId};
use kernel::Errno;
use kernel::cache;
use kernel::process::Who;

use crate::check::check_error::chain;
use crate::check::du::DuError;
use crate::disk::{DiskError, length};
use crate::shelf::images::{self, Use};
use crate::shelf::objects::split;
use crate::shelf::refs::{Form, RefName};
use crate::store::Store;
use native::Native;

/// Memory use of one image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageMemory {
    pub image: ImageId,
    pub refs: Vec<RefName>,
    /// Bytes in memory of the image file and of all copies of the image's data.
    pub bytes: u64,
    /// Part of `bytes`: the image file.
    pub metadata: u64,
    /// Part of `bytes`: copies that other images use as well.
    pub shared: u64,
    /// Part of `bytes`: all copies of the same data except one. This is an upper bound if only parts of copies are in
    /// memory.
    pub twice: u64,
    /// Number of examined mounts of the image. It is 0 for images of the form `objects`, which need not be examined.
    pub mounts: usize,
}

/// Memory use of all images.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Each image, sorted by id.
    pub images: Vec<ImageMemory>,
    /// Bytes in memory, each counted once.
    pub total: u64,
    /// Part of `total`: copies that more than one image uses.
    pub shared: u64,
    /// Part of `total`: all copies of the same data except one, also across images.
    pub twice: u64,
    /// Number of files that belong to another user, whose memory use this user may not see.
    pub unseen: u64,
    /// Messages about files that cannot be read.
    pub unreadable: Vec<String>,
    /// Whether a kernel shared pages among mounts. Copies of different domains are then counted as one, because the
    /// kernel does not report the domain of a mount.
    pub has_domains: bool,
}

/// Identity of data, regardless of the locations of its copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum DataIdentity {
    Object(ObjectId),
    /// Data of files of native images, identified by fingerprint.
    Content([u8; 32]),
    /// Data without a fingerprint, identified by the image's position in the list and the nid.
    Only(usize, u64),
}

/// The page cache that has a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cache {
    Object,
    /// The cache of a device; for a file in several devices, of the first one.
    Device(DeviceId),
    /// The cache of a mounted image, identified by its device number.
    Mount(u64),
    /// The cache that mounts share.
    Domain,
}

#[derive(Debug)]
struct Copy {
    cache: Cache,
    /// Each element is a number of pages, and the images that use these pages. An image may use only a part of a file
    /// in pieces.
    parts: Vec<(u64, Vec<usize>)>,
}

impl Copy {
    fn pages(&self) -> u64 {
        self.parts.iter().map(|it| it.0).sum()
    }

    /// Returns the number of pages that an image uses.
    fn pages_of(&self, user: usize) -> u64 {
        let parts = self.parts.iter().filter(|it| it.1.contains(&user));
        parts.map(|it| it.0).sum()
    }
}

#[derive(Debug)]
struct CountedImage {
    id: ImageId,
    pages: u64,
    /// Parts of the image file that were not in memory before the count.
    cold: Vec<Range<u64>>,
    native: Option<Native>,
    mounts: usize,
}

/// An unfinished count of memory use: first of the store, then of each mount passed to [`look`](Self::look).
#[derive(Debug)]
pub struct Memory<'s> {
    store: &'s Store,
    images: Vec<CountedImage>,
    copies: HashMap<DataIdentity, Vec<Copy>>,
    mounts: HashSet<u64>,
    unseen: u64,
    unreadable: Vec<String>,
}

/// Unit in which the page cache of an image file is inspected and dropped, in bytes.
const CHUNK: u64 = 64 << 10;

impl Store {
    /// Begins to count memory use with the files of the store. This reads only image files, and drops them from memory
    /// again. `gc` waits until the returned value is dropped.
    ///
    /// # Errors
    /// [`DuError`] if a file cannot be read.
    pub fn memory(&self) -> Result<Memory<'_>, DuError> {
        let _lock = self.lock_shared()?;
        let mut memory = Memory {
            store: self,
            images: Vec::new(),
            copies: HashMap::new(),
            mounts: HashSet::new(),
            unseen: 0,
            unreadable: Vec::new(),
        };
        let mut objects: HashMap<ObjectId, Vec<usize>> = HashMap::new();
        let ids = self.images.ids()?;
        for id in ids {
            let at = memory.images.len();
            let file = match self.images.open(&id) {
                Err(error) if error.is_not_a_file() => {
                    memory.unreadable.push(chain(&error));
                    continue;
                }
                other => match other? {
                    Some(found) => found,
                    None => continue,
                },
            };
            let size = file.size();
            let pages = memory.pages(file.fd(), &(0..size));
            let cold = cold(file.fd(), size, self.who);
            let mut visit = |_: &[u8], it: Use| {
                let Use::Object { object, .. } = it else { return };
                let users = objects.entry(object).or_default();
                if users.last() != Some(&at) {
                    users.push(at);
                }
            };
            let native = images::devices(&file).and_then(|devices| match devices.form {
                Some(Form::Objects) => images::uses(&file, &mut visit).map(|()| None),
                Some(Form::Packed | Form::Tar) | None => Native::read(at, &file).map(Some),
            });
            let native = native.unwrap_or_else(|error| {
                memory.unreadable.push(format!("image {id} is damaged: {}", chain(&error)));
                None
            });
            memory.images.push(CountedImage { id, pages, cold, native, mounts: 0 });
        }
        for (object, users) in objects {
            memory.add_object(object, &users)?;
        }
        memory.add_devices();
        Ok(memory)
    }
}

/// Returns the parts of a file that are not in memory.
fn cold(file: BorrowedFd<'_>, size: u64, who: Who) -> Vec<Range<u64>> {
    let starts = (0..size).step_by(usize::try_from(CHUNK).expect("64 KiB"));
    let chunks = starts.map(|at| at..(at + CHUNK).min(size));
    chunks.filter(|chunk| cache::resident(file, chunk, who) == Ok(0)).collect()
}

impl Memory<'_> {
    /// Returns the number of pages of a file's range that are in memory.
    fn pages(&mut self, file: BorrowedFd<'_>, bytes: &Range<u64>) -> u64 {
        cache::resident(file, bytes, self.store.who).unwrap_or_else(|_not_ours| {
            self.unseen += 1;
            0
        })
    }

    fn add_object(&mut self, object: ObjectId, users: &[usize]) -> Result<(), DiskError> {
        let Some(shard) = self.store.objects.shard(&object)? else { return Ok(()) };
        match shard.read(split(&object).1) {
            Ok(Some((file, stat))) => {
                let pages = self.pages(file.as_fd(), &(0..length(&stat)));
                self.add(DataIdentity::Object(object), Cache::Object, pages, users);
            }
            // The object is gone or damaged, which `fsck` reports.
            Ok(None) => {}
            Err(error) if error.is_not_a_file() => {}
            Err(error) if error.is(Errno::ACCESS) || error.is(Errno::PERM) => self.unseen += 1,
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Adds the pages that reads of devices as files have left in memory.
    fn add_devices(&mut self) {
        // For each device: range of each part, its data, and the image that uses it.
        let mut parts: HashMap<DeviceId, Vec<(Range<u64>, DataIdentity, usize)>> = HashMap::new();
        for (at, image) in self.images.iter().enumerate() {
            for (device, range, data) in image.native.iter().flat_map(Native::parts) {
                parts.entry(device).or_default().push((range, data, at));
            }
        }
        for (device, mut parts) in parts {
            let lazy = || self.store.lazy_devices.file(&device);
            let Some((file, stat)) = self.store.devices.file(&device).or_else(lazy) else {
                continue;
            };
            if self.pages(file.as_fd(), &(0..length(&stat))) == 0 {
                continue;
            }
            parts.sort_by_key(|(range, _, image)| (range.start, range.end, *image));
            // Images may use overlapping ranges, so pages are counted separately between any two neighbouring edges of
            // ranges.
            let mut edges: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
            let page = cache::page_size();
            for (number, (range, _, _)) in parts.iter().enumerate() {
                edges.entry(range.start / page * page).or_default().push(number);
                edges.entry(range.end.next_multiple_of(page)).or_default().push(number);
            }
            let mut here: BTreeSet<usize> = BTreeSet::new();
            let mut at = 0;
            for (edge, changes) in edges {
                // Bytes that belong to two files count as data of the first file.
                if let Some(first) = here.first() {
                    let users: BTreeSet<usize> = here.iter().map(|it| parts[*it].2).collect();
                    let users: Vec<usize> = users.into_iter().collect();
                    let pages = self.pages(file.as_fd(), &(at..edge));
                    self.add(parts[*first].1, Cache::Device(device), pages, &users);
                }
                at = edge;
                for number in changes {
                    if !here.remove(&number) {
                        here.insert(number);
                    }
                }
            }
        }
    }

    fn add(&mut self, data: DataIdentity, cache: Cache, pages: u64, users: &[usize]) {
        if pages == 0 {
            return;
        }
        let copies = self.copies.entry(data).or_default();
        let known = match cache {
            // Two files of a mount have separate pages.
            Cache::Object | Cache::Mount(_) => None,
            Cache::Domain => copies.iter_mut().find(|it| it.cache == cache),
            // The pieces of a file may be in several devices, but each piece is in only one of them.
            Cache::Device(_) => copies.iter_mut().find(|it| {
                let is_in_device = matches!(it.cache, Cache::Device(_));
                it.cache == cache || is_in_device && users.iter().any(|user| it.pages_of(*user) > 0)
            }),
        };
        let Some(known) = known else {
            let parts = vec![(pages, users.to_vec())];
            copies.push(Copy { cache, parts });
            return;
        };
        match (cache, known.parts.as_mut_slice()) {
            // Another mount shows the same shared pages.
            (Cache::Domain, [(seen, all)]) => {
                *seen = pages.max(*seen);
                all.extend_from_slice(users);
                all.sort_unstable();
                all.dedup();
            }
            // This is another piece of the same file.
            (_, parts) => match parts.iter_mut().find(|it| it.1 == users) {
                Some((seen, _)) => *seen += pages,
                None => known.parts.push((pages, users.to_vec())),
            },
        }
    }

    /// Returns the images that may be the source of a mounted EROFS, according to its superblock.
    fn candidates(&self, root: BorrowedFd<'_>) -> Result<Vec<usize>, Errno> {
        let (statfs, stat) = (rustix::fs::fstatfs(root)?, rustix::fs::fstat(root)?);
        // `erofs_statfs` in Linux fs/erofs/super.c: `f_ffree` is the maximum minus the number of inodes.
        let inodes = statfs.f_files.wrapping_sub(statfs.f_ffree);
        let fits = |native: &Native| native.inodes == inodes && native.root == stat.st_ino;
        let all = self.images.iter().enumerate();
        let fitting = all.filter(|(_, image)| image.native.as_ref().is_some_and(fits));
        Ok(fitting.map(|it| it.0).collect())
    }

    /// Counts a mount of an EROFS image: of `image`, or of the image of the store that matches the mount. A second
    /// mount of a superblock adds nothing. Returns whether the image of the mount is known.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn look(
        &mut self,
        image: Option<&ImageId>,
        root: BorrowedFd<'_>,
        shares: bool,
    ) -> Result<bool, Errno> {
        let device = rustix::fs::fstat(root)?.st_dev;
        if self.mounts.contains(&device) {
            return Ok(true);
        }
        let mut candidates = self.candidates(root)?;
        candidates.retain(|at| image.is_none_or(|image| self.images[*at].id == *image));
        let looks = candidates.into_iter().filter_map(|at| {
            let native = self.images[at].native.as_ref()?;
            Some((at, native.look(root, shares, self.store.who)?))
        });
        let mut looks: Vec<_> = looks.collect();
        // Two images with the same names, inode numbers and lengths cannot be distinguished.
        let (Some((at, look)), true) = (looks.pop(), looks.is_empty()) else { return Ok(false) };
        self.mounts.insert(device);
        self.images[at].mounts += 1;
        self.unseen += look.unseen;
        for (data, pages, is_shared) in look.found {
            let cache = if is_shared { Cache::Domain } else { Cache::Mount(device) };
            self.add(data, cache, pages, &[at]);
        }
        Ok(true)
    }

    /// Whether an image has its data on devices, so that only its mounts show its memory use.
    #[must_use]
    pub fn is_native(&self, image: &ImageId) -> bool {
        self.images.iter().any(|it| it.id == *image && it.native.is_some())
    }

    /// Adds up the counts, and drops the pages from memory that the count itself has read.
    ///
    /// # Errors
    /// [`DuError`] if names cannot be read.
    pub fn finish(self) -> Result<MemoryUse, DuError> {
        for image in &self.images {
            if let Ok(Some(file)) = self.store.images.open(&image.id) {
                for chunk in &image.cold {
                    // A failure is harmless: the pages stay in memory.
                    let _dropped = cache::drop_pages(file.fd(), chunk);
                }
            }
        }
        let (refs, bad) = self.store.refs.readable()?;
        let page = cache::page_size();
        let metadata = self.images.iter().map(|it| it.pages * page).sum();
        let mut used = MemoryUse {
            total: metadata,
            unseen: self.unseen,
            unreadable: bad.iter().map(|it| chain(&it.error)).chain(self.unreadable).collect(),
            ..MemoryUse::default()
        };
        let images = self.images.iter().map(|it| ImageMemory {
            image: it.id,
            refs: refs
                .iter()
                .filter(|named| named.1.image == it.id && !named.0.is_unnamed())
                .map(|it| it.0.clone())
                .collect(),
            bytes: it.pages * page,
            metadata: it.pages * page,
            shared: 0,
            twice: 0,
            mounts: it.mounts,
        });
        used.images = images.collect();
        for copies in self.copies.values() {
            used.twice += more_than_one(copies.iter().map(Copy::pages)) * page;
            let mut users = BTreeSet::new();
            for copy in copies {
                used.has_domains |= copy.cache == Cache::Domain;
                for (pages, whose) in &copy.parts {
                    let bytes = pages * page;
                    used.total += bytes;
                    let shared = if whose.len() > 1 { bytes } else { 0 };
                    used.shared += shared;
                    for user in whose {
                        used.images[*user].bytes += bytes;
                        used.images[*user].shared += shared;
                    }
                    users.extend(whose);
                }
            }
            for user in users {
                let own = copies.iter().map(|copy| copy.pages_of(user));
                used.images[user].twice += more_than_one(own) * page;
            }
        }
        Ok(used)
    }
}

/// Returns the total number of pages of all copies of the same data, minus the pages of the largest copy.
fn more_than_one(copies: impl Iterator<Item = u64> + Clone) -> u64 {
    let all: u64 = copies.clone().sum();
    all - copies.max().unwrap_or(0)
}
