//! Networks: records of the networks that containers join by name.
//!
//! `docs/format/object-store.md`, "Networks", describes the layout and the locks.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::fs::FileType;
use serde::{Deserialize, Serialize};

use super::LateDirectory;
use super::containers::check_id;
use super::refs::Seconds;
use crate::disk::{Directory, DiskError};
use crate::record::{self, RECORD_MAX, RecordError};
use crate::staging::Tmp;

/// The directory, which is created with the first network.
pub(crate) const NETWORKS: &str = "networks";

/// Maximum length of all labels of a network, in bytes.
pub const NETWORK_LABELS_MAX: usize = 256 << 10;

/// A network in a list: its name, and its record or the damage of the record.
pub type ListedNetwork = (String, Result<NetworkRecord, RecordError>);

/// The record of a network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkRecord {
    /// Random id of 64 hexadecimal digits.
    pub id: String,
    /// Time of creation.
    pub created: Seconds,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Name of the bridge, which no other network of the host has.
    pub bridge: String,
    /// First address of the subnet.
    pub address: Ipv4Addr,
    /// Number of leading bits that all addresses of the subnet share.
    pub prefix: u8,
    /// Address of the bridge.
    pub gateway: Ipv4Addr,
    /// Whether the network leads nowhere else.
    #[serde(default)]
    pub internal: bool,
    /// Whether the containers of the network resolve each other's names.
    #[serde(default)]
    pub dns: bool,
}

/// An error of a network.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetworkRecordError {
    /// The name is invalid.
    #[error("\"{}\" is not a name of a network: use 1 to 64 letters, digits, - _ and ., beginning with a letter, a \
        digit or _", .0.escape_debug())]
    Name(String),
    #[error("network {0} already exists")]
    Exists(String),
    #[error("there is no network \"{name}\": `quire network create {name}` makes it", name = .0.escape_debug())]
    Absent(String),
    /// The record cannot be read.
    #[error(
        "the record of network {name} is damaged: `quire network rm {name}`, then `quire network create {name}`"
    )]
    Damaged { name: String, source: RecordError },
    #[error("the labels of a network may have {NETWORK_LABELS_MAX} bytes")]
    Labels,
    #[error("the store {} is open read-only", .0.display())]
    ReadOnly(PathBuf),
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// A lock on the shelf. While it is held, no other process makes or removes a network.
#[derive(Debug)]
pub struct NetworkLock {
    directory: Directory,
}

/// The directory `networks/`, with one file per network.
#[derive(Debug)]
pub struct NetworkShelf {
    pub(crate) directory: LateDirectory,
    root: Arc<Directory>,
    tmp: Arc<Tmp>,
}

fn check_name(name: &str) -> Result<(), NetworkRecordError> {
    check_id(name).map_err(|_refused| NetworkRecordError::Name(name.to_owned()))
}

impl NetworkShelf {
    pub(crate) fn new(root: &Arc<Directory>, tmp: &Arc<Tmp>) -> Self {
        let directory = LateDirectory::new(Arc::clone(root), NETWORKS);
        Self { directory, root: Arc::clone(root), tmp: Arc::clone(tmp) }
    }

    /// Returns why the record of a network cannot be read, if it exists and cannot.
    pub(crate) fn damage(&self, name: &str) -> Result<Option<RecordError>, DiskError> {
        Ok(self.see(name)?.and_then(Result::err))
    }

    /// Returns the record of a network.
    ///
    /// # Errors
    /// [`NetworkRecordError::Absent`], [`NetworkRecordError::Damaged`], or an error of the disk.
    pub fn get(&self, name: &str) -> Result<NetworkRecord, NetworkRecordError> {
        check_name(name)?;
        let absent = || NetworkRecordError::Absent(name.to_owned());
        let damaged = |source| NetworkRecordError::Damaged { name: name.to_owned(), source };
        self.see(name)?.ok_or_else(absent)?.map_err(damaged)
    }

    /// Returns the networks, sorted by name, with their records or the damage of these.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn all(&self) -> Result<Vec<ListedNetwork>, NetworkRecordError> {
        let mut found = Vec::new();
        for name in self.names()? {
            // The network may have been removed since it was listed.
            found.extend(self.see(&name)?.map(|record| (name, record)));
        }
        Ok(found)
    }

    pub(crate) fn names(&self) -> Result<Vec<String>, DiskError> {
        let Some(shelf) = self.directory.get()? else { return Ok(Vec::new()) };
        let is_file = |kind| matches!(kind, FileType::RegularFile | FileType::Unknown);
        let listed = shelf.list()?.into_iter().filter(|it| is_file(it.kind));
        let names = listed
            .filter_map(|it| it.text().filter(|name| check_name(name).is_ok()).map(str::to_owned));
        let mut names: Vec<_> = names.collect();
        names.sort_unstable();
        Ok(names)
    }

    fn see(&self, name: &str) -> Result<Option<Result<NetworkRecord, RecordError>>, DiskError> {
        let Some(shelf) = self.directory.get()? else { return Ok(None) };
        match shelf.read_all(name, RECORD_MAX) {
            Ok(Some(bytes)) => Ok(Some(record::decode(&bytes))),
            Ok(None) => Ok(None),
            Err(error) if error.is_not_a_file() => Ok(Some(Err(RecordError::Checksum))),
            Err(error) => Err(error),
        }
    }

    /// Returns the paths of files that do not belong to the shelf.
    pub(crate) fn strays(&self) -> Result<Vec<PathBuf>, DiskError> {
        let Some(shelf) = self.directory.get()? else { return Ok(Vec::new()) };
        let is_ours = |name: Option<&str>, kind| {
            name.is_some_and(|it| check_name(it).is_ok())
                && matches!(kind, FileType::RegularFile | FileType::Unknown)
        };
        let listed = shelf.list()?.into_iter().filter(|it| !is_ours(it.text(), it.kind));
        Ok(listed.map(|it| shelf.path_of(&it.name)).collect())
    }

    /// Takes the lock that is needed to make or remove a network. The directory must exist.
    pub(crate) fn lock(&self) -> Result<NetworkLock, DiskError> {
        // Each holder needs a separate descriptor, because flock belongs to the open file description.
        let directory = self.root.open(NETWORKS)?;
        directory.lock()?;
        Ok(NetworkLock { directory })
    }

    /// Records a new network, durably.
    ///
    /// # Errors
    /// [`NetworkRecordError::Exists`] if the name is taken, or another [`NetworkRecordError`].
    pub fn publish(
        &self,
        lock: &NetworkLock,
        name: &str,
        record: &NetworkRecord,
    ) -> Result<(), NetworkRecordError> {
        check_name(name)?;
        let bytes = record.labels.iter().map(|(name, value)| name.len() + value.len());
        if bytes.sum::<usize>() > NETWORK_LABELS_MAX {
            return Err(NetworkRecordError::Labels);
        }
        if lock.directory.stat(name)?.is_some() {
            return Err(NetworkRecordError::Exists(name.to_owned()));
        }
        Ok(self.tmp.replace(&lock.directory, name, &record::encode(record))?)
    }

    /// Removes the record of a network.
    ///
    /// # Errors
    /// [`NetworkRecordError::Absent`], or an error of the disk.
    pub fn remove(&self, lock: &NetworkLock, name: &str) -> Result<(), NetworkRecordError> {
        check_name(name)?;
        if !lock.directory.unlink(name)? {
            return Err(NetworkRecordError::Absent(name.to_owned()));
        }
        Ok(lock.directory.sync()?)
    }
}
