//! Images in the store, and their forms.

mod archives;
pub(super) mod composefs_ids;
pub(super) mod counts;
pub(super) mod dax;
pub(super) mod disk;
pub(super) mod erofs_damage;
pub(super) mod erofs_files;
pub(super) mod erofs_layers;
pub(super) mod export;
pub(super) mod filter;
pub(super) mod forms;
pub(super) mod heals;
pub(super) mod holes;
mod image_lists;
pub(super) mod images;
pub(super) mod machine;
pub(super) mod merge;
pub(super) mod pieces;
pub(super) mod platforms;
pub(super) mod verified_disk;
