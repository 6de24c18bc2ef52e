"""The faults that `run.py` puts into the package, one at a time, and the tests of the day that have to catch each.

A fault that no test catches is a test that was lost, or never was there: write the test, and leave the fault as it is.
"""

from __future__ import annotations

import dataclasses

__all__ = ["FAULTS", "Fault"]


@dataclasses.dataclass(frozen=True)
class Fault:
    """What goes `wrong` where `old`, which is once in a module, is `new`.

    `module`: its path below the package. `tests`: files or ids of tests, the narrowest and fastest first. `nightly`: only tests
    of the night catch it.
    """

    name: str
    wrong: str
    module: str
    old: str
    new: str
    tests: tuple[str, ...]
    nightly: bool = False


_VALUE = """\
        value = {
            "digest": version.digest,
            "log": version.commit,
            "started_s": started_s,
            "boot": self._context.clock.boot,
            "wall_s": self._context.clock.wall_s(),
        }
"""

FAULTS = [
    # --- locks and claims
    Fault(
        "a-block-lock-is-ignored",
        "Who does not get the lock of a block fetches it all the same, so that several load it.",
        "io/block_cache.py",
        "        if lock is None:\n            return False\n",
        "        if lock is None:\n            return True\n",
        ("tests/test_blocks.py::test_one_loader_at_a_time",),
    ),
    Fault(
        "a-claim-has-no-lock",
        "A claim is not locked, so that others take it for that of a dead process.",
        "io/disk/claims.py",
        "            fcntl.flock(fd, fcntl.LOCK_EX)\n",
        "",
        ("tests/test_claims.py::test_a_claim_is_seen_while_it_is_held",),
    ),
    Fault(
        "the-directory-is-not-locked",
        "The counter of bytes, evictions and repairs of the cache directory take no lock.",
        "io/disk/directory.py",
        "                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n                    break\n",
        "                    break\n",
        ("tests/test_disk.py::test_a_lock_held_for_long_costs_a_moment",),
    ),
    Fault(
        "loads-of-a-snapshot-exclude-nobody",
        "Two processes of a host load the same full cache at the same time.",
        "cache/full/store.py",
        'self.disk.acquire("reload", self.key, _LOCK_WAIT_S)',
        'self.disk.acquire("reload", f"{self.key}{id(self)}", _LOCK_WAIT_S)',
        ("tests/test_full_cache.py::test_one_process_of_the_host_loads_at_a_time",),
    ),
    Fault(
        "a-key-is-loaded-twice",
        "Keys that another process is loading are loaded here as well.",
        "cache/partial/single_flight.py",
        "theirs = (others[at] == self.hashes) & self.mine",
        "theirs = (others[at] != others[at]) & self.mine",
        ("tests/test_claims.py::test_nothing_is_claimed_by_who_loads_nothing",),
    ),
    Fault(
        "a-fork-uses-its-parents-runtime",
        "A process that was forked goes on with the connections and threads of its parent.",
        "engine/runtime.py",
        "if _current is None or _current.pid != os.getpid():",
        "if _current is None:",
        ("tests/providers/test_making.py::test_a_forked_child_opens_a_function_of_its_own",),
    ),
    # --- the cache directory
    Fault(
        "a-block-is-not-checked",
        "A block or record whose bytes were damaged on the disk is taken as it is.",
        "io/disk/directory.py",
        "return data if zlib.crc32(data, zlib.crc32(bound)) == crc else None",
        "return data",
        ("tests/test_fuzz.py::test_a_damaged_block_or_record_is_a_miss",),
    ),
    Fault(
        "a-block-of-another-name-is-taken",
        "A block or record that was made for another name is taken.",
        "io/disk/directory.py",
        " or bound != bytes.fromhex(key_of(name)):",
        ":",
        ("tests/test_disk.py::test_a_block_in_anothers_place_is_a_miss",),
    ),
    Fault(
        "a-segment-is-not-checked",
        "A segment whose bytes were damaged on the disk is mapped and answered from.",
        "io/disk/segments.py",
        "        if found != crc:\n            return False\n",
        "",
        ("tests/test_segments.py::test_a_damaged_segment_is_absent",),
    ),
    Fault(
        "the-end-of-a-segment-is-not-checked",
        "The footer of a segment is believed without its checksum.",
        "io/disk/segments.py",
        "    if zlib.crc32(text) != crc:\n        return None\n",
        "",
        ("tests/test_segments.py::test_a_damaged_segment_is_absent",),
    ),
    Fault(
        "counters-are-not-checked",
        "Counters that were damaged, or read while they were written, are added up.",
        "io/disk/counters.py",
        "        if _checksum(data) != blob[length + numbers.size :]:\n            return None\n",
        "",
        ("tests/test_counters.py::test_damaged_files",),
    ),
    Fault(
        "a-record-takes-the-place-of-the-first",
        "A record that has to be the first of its name replaces the one that is there.",
        "io/disk/directory.py",
        "            os.link(temporary, path)  # fails if it exists, unlike rename\n",
        "            path.unlink(missing_ok=True)\n            os.link(temporary, path)\n",
        ("tests/test_disk.py::test_the_first_record_stays",),
    ),
    Fault(
        "a-row-of-records-goes-back",
        "Who was stopped before it put a record puts it over a newer one.",
        "io/disk/records.py",
        "        if max(numbers, default=0) != number + 1:\n            return False\n",
        "",
        ("tests/test_disk.py::test_a_row_of_records_never_goes_back",),
    ),
    Fault(
        "a-file-is-written-in-place",
        "Blocks and records are written where they are read, instead of being renamed when they are whole.",
        "io/disk/directory.py",
        (
            "        temporary = self._write_temporary(data)\n"
            "        try:\n"
            "            os.replace(temporary, path)\n"
            "        except OSError:\n"
            "            self._remove(temporary)\n"
            "            raise\n"
        ),
        '        with open(path, "wb") as file:\n            file.write(data)\n',
        ("tests/test_disk.py::test_a_full_disk",),
    ),
    Fault(
        "the-budget-is-exceeded",
        "The cache directory takes twice its budget.",
        "io/disk/space.py",
        "        return self._max_bytes if self._max_bytes is not None",
        "        return 2 * self._max_bytes if self._max_bytes is not None",
        ("tests/test_disk.py::test_the_budget_holds", "tests/test_budget.py::test_no_host_fills_its_disk"),
    ),
    Fault(
        "what-is-built-is-not-counted",
        "Segments that are being built take nothing of the budget.",
        "io/disk/space.py",
        '        self._space.take("segments", max(more, 0))\n',
        "",
        ("tests/test_budget.py::test_no_host_fills_its_disk",),
    ),
    Fault(
        "blocks-go-after-tables",
        "When the budget is short tables are removed before blocks.",
        "io/disk/blocks.py",
        """        steps += [self._evict_blocks]
        steps += [self._evict_tables] if kind != "blocks" else []
""",
        """        steps += [self._evict_tables] if kind != "blocks" else []
        steps += [self._evict_blocks]
""",
        ("tests/test_budget.py::test_what_goes_first",),
    ),
    Fault(
        "a-refused-build-is-tried-at-every-query",
        "A build without room is begun again by the next query.",
        "cache/full/full_cache.py",
        "        return refused is None or abs(self.context.clock.wall_s() - refused.at_s) >= _GIVE_UP_S\n",
        "        return True\n",
        ("tests/test_budget.py::test_a_build_without_room",),
    ),
    Fault(
        "the-newest-blocks-are-evicted",
        "Evictions take the blocks that were used last instead of those that were not used for long.",
        "io/disk/blocks.py",
        "key=lambda found: found[0]):",
        "key=lambda found: -found[0]):",
        ("tests/test_disk.py::test_an_eviction_takes_old_blocks_and_few",),
    ),
    Fault(
        "counters-are-not-published",
        "What a process counts is never put where the host adds it up.",
        "io/host_metrics.py",
        "self._put(self._disk, self.metrics.pack())",
        "self.metrics.pack()",
        ("tests/test_observing.py::test_prometheus_has_the_sums_of_all_processes",),
    ),
    # --- the store
    Fault(
        "s3-reads-are-not-pinned",
        "Reads from S3 do not say of which version (If-Match) they want the bytes.",
        "io/stores/s3.py",
        'match = {"IfMatch": f\'"{etag}"\'} if etag else {}',
        "match: dict[str, str] = {}",
        ("tests/test_stores.py::test_head_and_list_give_one_token",),
    ),
    Fault(
        "s3-bytes-of-another-version-are-taken",
        "The ETag beside the bytes of a server that ignores If-Match is not looked at.",
        "io/stores/s3.py",
        "if etag and found != etag:",
        "if not found:",
        ("tests/faults/test_matrix.py::test_a_store_that_ignores_if_match",),
    ),
    Fault(
        "s3-puts-replace-what-is-there",
        "A put to S3 does not ask for the place to be free, so that a commit overwrites another one.",
        "io/stores/s3.py",
        ', IfNoneMatch="*")',
        ")",
        ("tests/test_ufs.py::test_first_come",),
    ),
    Fault(
        "a-file-is-not-checked-before-a-read",
        "A local file is not compared with its version before it is read.",
        "io/stores/local.py",
        "            self._check(descriptor, file)\n\n",
        "",
        ("tests/test_stores.py::test_a_file_replaced_by_a_directory",),
    ),
    Fault(
        "a-file-is-not-checked-after-a-read",
        "A local file that was changed while it was read is not noticed.",
        "io/stores/local.py",
        "            yield read\n            self._check(descriptor, file)\n",
        "            yield read\n",
        ("tests/test_stores.py::test_overwritten_between_two_ranges",),
    ),
    Fault(
        "a-store-without-pins-is-not-asked-again",
        "A store that cannot pin is not asked after a read whether the file has changed.",
        "io/ufs.py",
        "if self._store.pins or file.immutable:",
        "if self._store:",
        ("tests/test_ufs.py::test_an_unpinned_store_is_asked_again_after_the_bytes",),
    ),
    Fault(
        "a-short-read-is-handed-out",
        "Fewer bytes than were asked for are taken for all of them.",
        "io/ufs.py",
        "if len(data) != length:",
        "if not data:",
        ("tests/test_ufs.py::test_a_short_read_is_tried_again_and_never_handed_out",),
    ),
    Fault(
        "one-retry-less-at-the-store",
        "A request is tried once less than lookup.max-retries says.",
        "io/ufs.py",
        "tenacity.stop_after_attempt(max_retries + 1)",
        "tenacity.stop_after_attempt(max(max_retries, 1))",
        ("tests/test_stores.py::test_a_busy_server_is_asked_again",),
    ),
    Fault(
        "refusals-are-tried-again",
        "A request that the store refuses is tried again as if it were busy.",
        "io/ufs.py",
        "tenacity.retry_if_exception_type(_UNANSWERED)",
        "tenacity.retry_if_exception_type(UfsError)",
        ("tests/test_ufs.py::test_attempts_end",),
    ),
    Fault(
        "an-unknown-put-is-called-failed",
        "A put of which nobody knows whether it arrived is said to have failed.",
        "io/ufs.py",
        "            if unanswered:\n                raise PutUnknownError",
        "            if not data:\n                raise PutUnknownError",
        ("tests/test_notifications.py::test_commits_of_which_nothing_is_known",),
    ),
    Fault(
        "what-a-lost-put-has-put-is-not-looked-for",
        "After a put without an answer nobody looks whether the file is there.",
        "io/ufs.py",
        (
            "            with contextlib.suppress(UfsError):\n"
            "                return self._find_written(path, data)\n"
            "            if unanswered:"
        ),
        "            if unanswered:",
        ("tests/test_ufs.py::test_first_come",),
    ),
    Fault(
        "files-that-are-too-new-are-kept",
        "Bytes of a file that may yet change without a trace are cached.",
        "io/stores/file_version.py",
        "return bool(self.identity) and self.settled",
        "return bool(self.identity)",
        ("tests/test_blocks.py::test_a_version_not_settled_is_read_and_not_kept",),
    ),
    # --- keys, index, predicates
    Fault(
        "the-index-misses-the-last-of-a-bucket",
        "The last key of each bucket of the hash index is not compared.",
        "columnar/hash_index.py",
        "on = np.flatnonzero(~matching & (candidates < ends))",
        "on = np.flatnonzero(~matching & (candidates + 1 < ends))",
        ("tests/test_index.py::test_probing",),
    ),
    Fault(
        "the-index-misses-the-last-slot",
        "The largest key of an index with slots is not found.",
        "columnar/hash_index.py",
        "inside = at < np.uint64(len(self._slots))",
        "inside = at < np.uint64(len(self._slots) - 1)",
        ("tests/test_index.py::test_probing",),
    ),
    Fault(
        "a-null-in-one-key-column-is-a-key",
        "A key of several columns is null only if all of them are.",
        "columnar/keys.py",
        "known if self.valid is None else self.valid & known",
        "known if self.valid is None else self.valid | known",
        ("tests/test_keys.py::test_equal_keys_hash_alike",),
    ),
    Fault(
        "nan-is-no-key",
        "A key that is NaN does not find the rows with NaN.",
        "columnar/keys.py",
        "            same |= np.isnan(mine) & np.isnan(theirs)\n",
        "            same &= ~np.isnan(mine)\n",
        ("tests/test_keys.py::test_equal_keys_hash_alike",),
    ),
    Fault(
        "two-zeros-are-two-keys",
        "The key -0.0 does not find the rows with 0.0.",
        "columnar/keys.py",
        "self.values.astype(np.float64) + 0.0 ",
        "self.values.astype(np.float64) ",
        ("tests/test_keys.py::test_equal_keys_hash_alike",),
    ),
    Fault(
        "large-keys-wrap-around",
        "A key that the column's type cannot hold becomes another number.",
        "columnar/keys.py",
        "return pc.if_else(inside, array, pa.scalar(None, array.type)).cast(kind)",
        "return pc.if_else(inside, array, array).cast(kind, safe=False)",
        ("tests/test_keys.py::test_keys_in_another_type",),
    ),
    Fault(
        "pruning-misses-the-lower-bound",
        "A row group whose least value is just that of `<=` is left out.",
        "columnar/predicate.py",
        "return bool(low <= value)\n",
        "return bool(low < value)\n",
        ("tests/test_predicate.py::test_evaluate_at_the_edges",),
    ),
    Fault(
        "pruning-misses-nan",
        "A row group with NaN above its bounds is left out of `> value`.",
        "columnar/predicate.py",
        "return isinstance(low, float) or bool(",
        "return bool(",
        ("tests/test_predicate.py::test_evaluate_at_the_edges",),
    ),
    Fault(
        "some-nulls-are-all-nulls",
        "A row group with a null in it counts as one with nulls only, and is left out.",
        "columnar/predicate.py",
        "self.null_count >= self.rows",
        "self.null_count > 0",
        ("tests/test_predicate.py::test_evaluate_at_the_edges",),
    ),
    # --- versions
    Fault(
        "a-version-is-named-without-sizes",
        "Two states of a file of different sizes are one version.",
        "table/model.py",
        "for part in (file.url, file.size, file.identity))",
        "for part in (file.url, file.identity))",
        ("tests/test_table.py::test_digests_are_equal_if_and_only_if_the_files_are",),
    ),
    Fault(
        "a-version-is-named-without-identities",
        "Two states of a file of one size are one version.",
        "table/model.py",
        "for part in (file.url, file.size, file.identity))",
        "for part in (file.url, file.size))",
        ("tests/test_table.py::test_digests_are_equal_if_and_only_if_the_files_are",),
    ),
    Fault(
        "a-version-is-named-without-deletes",
        "Two versions that differ in their deleted rows only are one.",
        "table/model.py",
        "return key_of(self.table_id, *parts, *deletes)",
        "return key_of(self.table_id, *parts, *(() if deletes else ()))",
        ("tests/test_table.py::test_deleted_rows_make_another_digest",),
    ),
    Fault(
        "a-host-goes-back-in-the-log",
        "A host replaces what it knows of a log by an older position of it.",
        "table/host_versions.py",
        "return int(known[1]) > commit[1]",
        "return int(known[1]) < 0",
        ("tests/test_managed.py::test_a_host_never_goes_back",),
    ),
    Fault(
        "a-slow-listing-takes-a-host-back",
        "A listing that began before the last known one replaces it.",
        "table/host_versions.py",
        'record["started_s"] > started_s)',
        'record["started_s"] < 0)',
        ("tests/test_metadata.py::test_a_slow_listing_cannot_take_the_host_back",),
    ),
    Fault(
        "the-clock-of-another-boot-is-believed",
        "What was learned before the host was started anew counts as newer than what the store says now.",
        "table/host_versions.py",
        'return bool(record["boot"] == self._context.clock.boot and record',
        "return bool(record",
        ("tests/test_metadata.py::test_another_boot_is_not_trusted_for_an_age",),
    ),
    Fault(
        "own-commits-are-not-read",
        "A host in CACHE mode answers from a version without its own last commit.",
        "table/resolver.py",
        'if not self.host.reaches(record.get("log"), table.url, options):',
        "if not record:",
        ("tests/test_writing.py::test_reads_see_the_hosts_writes",),
    ),
    Fault(
        "a-floor-is-not-raised",
        "After its first commit a host need not read its later ones.",
        "table/host_versions.py",
        "known is None or known[0] != table_id or known[1] < position",
        "known is None or known[0] != table_id",
        ("tests/test_writing.py::test_reads_see_the_hosts_writes",),
    ),
    Fault(
        "the-age-is-by-the-wall-clock",
        "In CACHE mode the age of a version is taken by a clock that may be set back.",
        "table/resolver.py",
        'age_s = self._context.clock.steady_s() - record["started_s"]',
        'age_s = self._context.clock.wall_s() - record["wall_s"]',
        ("tests/test_metadata.py::test_cache_mode_makes_no_call_within_its_interval",),
    ),
    Fault(
        "the-age-is-by-another-boots-clock",
        "In CACHE mode the age of a version from before the host was started anew is believed.",
        "table/resolver.py",
        'if interval_s > 0 and (record["boot"] != self._context.clock.boot or age_s > interval_s):',
        "if interval_s > 0 and age_s > interval_s:",
        ("tests/test_metadata.py::test_another_boot_is_not_trusted_for_an_age",),
    ),
    Fault(
        "each-task-decides-on-its-version",
        "The version of an execution is not put on record, so that its tasks may read two.",
        "table/executions.py",
        'winner = self._disk.create_record("execution", key, [version.digest, at_s], _decided_of).digest',
        "winner = _decided_of([version.digest, at_s]).digest",
        ("tests/test_metadata.py::test_one_execution_sees_one_version_and_asks_once",),
    ),
    Fault(
        "the-last-task-decides-on-the-version",
        "The version of an execution is recorded over the one that an earlier task has decided on.",
        "table/executions.py",
        'winner = self._disk.create_record("execution", key, [version.digest, at_s], _decided_of).digest',
        ('self._disk.replace_record("execution", key, [version.digest, at_s])\n            winner = version.digest'),
        ("tests/test_metadata.py::test_who_does_not_get_the_lock_takes_what_was_decided_first",),
    ),
    Fault(
        "files-are-recorded-after-their-digest",
        "Who sees the version that a host learned last may not find its files on record yet.",
        "table/host_versions.py",
        (
            f"        self._remember_files(table, version)\n{_VALUE}"
            '        return disk.succeed_record("table", table.id, number, value)\n'
        ),
        (
            f'{_VALUE}        done = disk.succeed_record("table", table.id, number, value)\n'
            "        self._remember_files(table, version)\n"
            "        return done\n"
        ),
        ("tests/test_metadata.py::test_who_knows_a_version_knows_its_files",),
    ),
    Fault(
        "a-token-of-another-table-is-taken",
        "The version that a token names is read although it is one of another table.",
        "table/host_versions.py",
        "if version is None or version.digest != digest:",
        "if version is None:",
        ("tests/test_metadata.py::test_the_version_of_another_table_is_none_of_this_one",),
    ),
    Fault(
        "any-version-is-found-for-a-token",
        "A host takes the current version for the one that a token names.",
        "table/resolver.py",
        "(state for state in states if state.digest == digest), None)",
        "iter(states), None)",
        ("tests/test_version_token.py::test_a_version_that_is_served_is_announced_without_a_call",),
    ),
    Fault(
        "types-of-the-chosen-partitions-only",
        "Partition columns have the types of those partitions only that lookup.partition leaves.",
        "engine/version_reader.py",
        "data, partitions = self.schema(table, version)\n        everything",
        (
            "data, partitions = self.schema(table, version.of_files(select_partitions(table, version, options)))\n"
            "        everything"
        ),
        tuple(
            f"tests/differential/test_histories.py::test_what_was_found[W2 {cache}]" for cache in ("PARTIAL", "FULL")
        ),
    ),
    Fault(
        "a-table-is-read-while-a-job-writes-it",
        "The directories by which a job says that it writes are not looked at.",
        "table/listing.py",
        "if directory not in dead]",
        "if directory in dead]",
        ("tests/test_table.py::test_what_lies_beside_a_glob_is_none_of_its_business",),
    ),
    # --- the partial cache
    Fault(
        "carry-over-leaves-the-upper-bound-out",
        "The greatest key of a changed file is taken for unchanged.",
        "cache/partial/carry_over.py",
        "pc.less_equal(key, high)",
        "pc.less(key, high)",
        ("tests/partial/test_changes.py::test_what_cannot_differ_does_not",),
    ),
    Fault(
        "carry-over-forgets-nan",
        "The key NaN is taken for unchanged, as it lies between no bounds.",
        "cache/partial/carry_over.py",
        "if pa.types.is_floating(key.type):  # NaN",
        "if pa.types.is_null(key.type):  # NaN",
        ("tests/partial/test_changes.py::test_what_cannot_differ_does_not",),
    ),
    Fault(
        "carry-over-ignores-deletes",
        "Keys of a file are taken for unchanged when rows of it were deleted.",
        "cache/partial/carry_over.py",
        "if one.keys is None]",
        "if one.keys is None and not file.deletes]",
        ("tests/test_toy_source.py::test_reads_follow_its_versions",),
    ),
    Fault(
        "carry-over-ignores-files-of-deletes",
        "Keys that a managed table's upsert or delete names are taken for unchanged.",
        "cache/partial/carry_over.py",
        "files = [*version.files, *keyed]",
        "files = [*version.files, *keyed[:0]]",
        ("tests/test_compaction.py::test_writes_beside_a_compaction",),
    ),
    Fault(
        "compactions-count-as-changes",
        "A compaction makes all keys of its files be loaded anew.",
        "cache/partial/carry_over.py",
        "            known = (known - set(replaced)) | set(own)\n",
        "",
        ("tests/test_compaction.py::test_partial_keeps_its_keys",),
    ),
    Fault(
        "an-old-entry-of-the-host-does-not-expire",
        "Rows that the host shares are answered from after expire-after-write.",
        "cache/partial/host_cache.py",
        "live &= part.loaded_s[rows] > now_s - bounds.expire_after_write_s",
        "live &= part.loaded_s[rows] <= now_s",
        ("tests/partial/test_histories.py::test_nothing_is_lost_before_its_time",),
    ),
    Fault(
        "absences-do-not-expire",
        "That a key has no rows is remembered for ever.",
        "cache/partial/host_cache.py",
        "live &= part.loaded_s[rows] > now_s - bounds.expire_after_write_s",
        "live &= ~part.found[rows] | (part.loaded_s[rows] > now_s - bounds.expire_after_write_s)",
        ("tests/partial/test_histories.py::test_nothing_is_lost_before_its_time",),
    ),
    Fault(
        "absences-are-kept-unasked",
        "That a key has no rows is shared although lookup.partial-cache.cache-missing-key is false.",
        "cache/partial/host_cache.py",
        "absent = np.full(count, self.bounds.missing_keys)",
        "absent = np.full(count, True)",
        ("tests/providers/test_functions.py::test_a_default_cache_of_its_own",),
    ),
    Fault(
        "ages-of-another-boot-are-believed",
        "Rows that were loaded before the host was started anew are as old as another clock says.",
        "cache/partial/host_cache.py",
        "if not part.this_boot and (",
        "if part.this_boot is None and (",
        ("tests/partial/test_merging.py::test_another_boot",),
    ),
    Fault(
        "one-row-above-the-bound",
        "The cache of a process holds one row more than it may.",
        "cache/memory/default_cache.py",
        "rows, size = held.live_rows - self._max_rows, ",
        "rows, size = held.live_rows - self._max_rows - 1, ",
        ("tests/caching/test_same_as_a_dict.py::test_a_cache_is_an_ordered_dictionary",),
    ),
    Fault(
        "an-old-entry-of-a-process-does-not-expire",
        "Rows in the cache of a process are answered from after expire-after-write.",
        "cache/memory/default_cache.py",
        "expired |= held.written_s(entries[found]) <= now_s - self._write_s",
        "expired |= held.written_s(entries[found]) < 0",
        ("tests/caching/test_same_as_a_dict.py::test_a_cache_is_an_ordered_dictionary",),
    ),
    Fault(
        "a-load-makes-its-rows-young",
        "Rows are as old as the end of their load, not as its beginning.",
        "cache/partial/read_through.py",
        "age_s = clock.steady_s() - started_s\n",
        "age_s = 0.0\n",
        ("tests/partial/test_through.py::test_entries_are_as_old_as_the_moment_before_their_load",),
    ),
    Fault(
        "a-key-is-loaded-once-more",
        "Who waited for another's load of a key does not look whether it is there now.",
        "cache/partial/read_through.py",
        "                mine = self._find_shared(different, hashes, mine, query)\n",
        "",
        ("tests/partial/test_through.py::test_many_callers_of_few_keys",),
    ),
    # --- deleted rows, the full cache
    Fault(
        "a-deleted-row-is-scanned",
        "A scan shows a row that is the only deleted one of its batch.",
        "scan/deletes.py",
        "    if low == high:\n",
        "    if low + 1 >= high:\n",
        ("tests/test_toy_source.py::test_reads_follow_its_versions",),
    ),
    Fault(
        "a-deleted-row-is-found-in-a-layer",
        "A lookup of one key in a full cache finds a row that was deleted.",
        "cache/full/snapshot.py",
        "if layer.deleted is not None and len(rows):",
        "if layer.deleted is not None and len(rows) > 1:",
        ("tests/test_managed.py::test_a_full_cache_fetches_what_a_commit_added",),
    ),
    Fault(
        "a-deleted-row-comes-back-by-a-reload",
        "A reload that finds more rows deleted goes on with the marks that it had.",
        "cache/full/loader.py",
        "if (gone, marked) == (stored.gone, stored.marked):",
        "if gone == stored.gone:",
        ("tests/test_toy_source.py::test_reads_follow_its_versions",),
    ),
    Fault(
        "a-row-that-was-deleted-later-is-lost",
        "A full cache of an older version is made of layers that lack the rows which were deleted since.",
        "cache/full/loader.py",
        "if set(segment.marks) <= set(marks):",
        "if set(marks) != {None}:",
        ("tests/test_managed.py::test_a_snapshot_of_an_older_version_has_the_rows_deleted_since",),
    ),
    Fault(
        "a-reload-is-not-made",
        "A reload after a fixed delay is put off each time that somebody asks when it is due.",
        "options/reload_trigger.py",
        "return min(last.finished_at_s, now_s) + self.interval_s",
        "return now_s + self.interval_s",
        ("tests/test_reload.py::test_when_a_periodic_reload_is_due",),
    ),
    Fault(
        "a-reload-that-nobody-was-there-for-is-not-made",
        "A reload that came due while no process lived is not made by the next one.",
        "cache/full/schedule.py",
        "return self._trigger.next_due_s(self.last(), now_s) <= now_s",
        "return self._trigger.next_due_s(self.last(), now_s) < 0",
        ("tests/test_full_cache.py::test_a_reload_that_came_due_while_no_worker_lived_happens_at_the_next_use",),
    ),
    Fault(
        "a-blackout-is-ignored",
        "A reload begins within lookup.full-cache.reload-blackout.",
        "cache/full/schedule.py",
        "            if free_s > now_s:\n",
        "            if free_s < now_s:\n",
        ("tests/test_full_cache.py::test_blackout_puts_a_reload_off",),
    ),
    Fault(
        "a-blackout-begins-too-late",
        "A reload begins at the very moment at which a blackout does.",
        "options/reload_trigger.py",
        "if start_s <= at_s < end_s]",
        "if start_s < at_s < end_s]",
        ("tests/test_reload.py::test_local_blackouts_follow_the_clocks",),
    ),
    Fault(
        "a-clock-that-was-set-back-is-not-noticed",
        "Reloads wait until the wall clock shows again what it showed before it was set back.",
        "cache/full/schedule.py",
        "return self._wall_ahead_s < before - _POLL_S",
        "return self._wall_ahead_s < before - 1e12",
        ("tests/test_clock_steps.py::test_timers_after_the_clock_was_set_back",),
    ),
    Fault(
        "a-failed-reload-is-not-told",
        "With on-reload-failure=FAIL an older snapshot is served after a reload that has failed.",
        "cache/full/full_cache.py",
        "is OnReloadFailure.FAIL and state.failures:",
        "is OnReloadFailure.FAIL and state.failures > 9:",
        ("tests/test_full_cache.py::test_fail_refuses_after_a_failed_reload_until_one_succeeds",),
    ),
    Fault(
        "segments-go-before-what-names-them",
        "Segments are removed before the record that names them is replaced.",
        "cache/full/store.py",
        (
            "        self.record(state)\n"
            "        with self._mutex:\n"
            "            for version in expired:\n"
            "                self._open.pop(version.digest, None)\n"
            '                self.disk.remove_record("snapshot", self._beside(version.digest))\n'
            "        used = {name for version in versions for name in _names_of(version)}\n"
            "        names = [name for name in self.disk.segments(self.key) if name not in used]\n"
            "        left = tuple(name for name in names if not self.disk.remove_segment(self.key, name))\n"
            "        if left != state.left:\n"
            "            self.record(dataclasses.replace(state, left=left))\n"
        ),
        (
            "        with self._mutex:\n"
            "            for version in expired:\n"
            "                self._open.pop(version.digest, None)\n"
            '                self.disk.remove_record("snapshot", self._beside(version.digest))\n'
            "        used = {name for version in versions for name in _names_of(version)}\n"
            "        names = [name for name in self.disk.segments(self.key) if name not in used]\n"
            "        left = tuple(name for name in names if not self.disk.remove_segment(self.key, name))\n"
            "        self.record(dataclasses.replace(state, left=left))\n"
        ),
        ("tests/test_full_cache.py::test_no_segment_goes_before_what_names_it",),
    ),
    # --- managed tables
    Fault(
        "an-event-is-not-checked",
        "An event of the log whose bytes were damaged is taken as it is.",
        "table/log/events.py",
        'if found["format"] <= FORMAT and not data',
        'if found["format"] < 0 and not data',
        ("tests/test_notifications.py::test_events_round_trip",),
    ),
    Fault(
        "a-commit-of-unknown-end-is-made-again",
        "A commit of which nobody knows whether it is in the log is put there once more.",
        "table/log/log.py",
        ("        except PutUnknownError as problem:\n            raise self._unknown(event, problem) from problem\n"),
        "        except PutUnknownError:\n            return None\n",
        ("tests/test_notifications.py::test_commits_of_which_nothing_is_known",),
    ),
    Fault(
        "an-event-follows-another-table",
        "An event that was made for a table which was dropped stays in the log of the new one.",
        "table/log/log.py",
        "elif self._has_followed(state, event):",
        "elif state is not None:",
        ("tests/test_notifications.py::test_a_table_recreated_under_an_append",),
    ),
    Fault(
        "a-table-that-was-made-anew-is-not-noticed",
        "The log of a table that was dropped and made anew is read on from where the old one was.",
        "table/log/log.py",
        "return file if event.nonce == state.nonce else None",
        "return file if event.nonce else None",
        ("tests/test_notifications.py::test_a_table_that_was_recreated",),
    ),
    Fault(
        "open-writes-are-valid",
        "Rows of a write that has not ended are seen.",
        "table/log/state.py",
        "for write in self.writes.values() if not write.committed or (write.ended_at or 0) > at]",
        "for write in self.writes.values() if write.ended_at is not None and (not write.committed or write.ended_at > at)]",
        ("tests/test_notifications.py::test_states_follow_the_model",),
    ),
    Fault(
        "aborted-writes-are-valid",
        "Writes that were aborted count as committed.",
        "table/log/state.py",
        "return ValidWriteIdList(self.table_id, allocated, opened, aborted)",
        "return ValidWriteIdList(self.table_id, allocated, opened, {*aborted} & {0})",
        ("tests/test_notifications.py::test_states_follow_the_model",),
    ),
    Fault(
        "writes-above-the-watermark-are-valid",
        "A list of write ids lets through writes that it does not know of.",
        "base/write_ids.py",
        "return self._check_number(id_) <= self.high_watermark and not",
        "return self._check_number(id_) > 0 and not",
        ("tests/test_writeids.py::test_questions",),
    ),
    Fault(
        "an-overwrite-beside-an-upsert",
        "An overwrite that began before an upsert is committed after it, so that its keys are there twice.",
        "table/log/state.py",
        "if write.mode is WriteMode.OVERWRITE and self._keyed_by > write_id:",
        "if write.mode is WriteMode.OVERWRITE and self._keyed_by < 0:",
        ("tests/test_by_key.py::test_an_append_beside_an_upsert_stays",),
    ),
    Fault(
        "an-append-that-an-overwrite-has-passed",
        "An append that began before an overwrite is committed after it, and never seen.",
        "table/log/state.py",
        "if self._replaced_by > write_id and",
        "if self._replaced_by < 0 and",
        ("tests/test_notifications.py::test_commits_that_cannot_be",),
    ),
    Fault(
        "a-compaction-beside-an-overwrite",
        "A compaction of writes that were overwritten or compacted meanwhile is committed.",
        "managed/conflicts.py",
        "        if not same:\n",
        "        if not state.table_id:\n",
        ("tests/test_compaction.py::test_two_compactions_at_once",),
    ),
    Fault(
        "an-upsert-beside-a-compaction",
        "Rows that an upsert has replaced while they were compacted come back.",
        "managed/conflicts.py",
        "return [write.id for write in ended if write.deletes and write.id not in self._looked]",
        "return [write.id for write in ended if not write.id and write.id not in self._looked]",
        ("tests/test_compaction.py::test_writes_beside_a_compaction",),
    ),
    Fault(
        "unique-keys-are-checked-once",
        "A key that another append has added meanwhile is added with unique-keys all the same.",
        "managed/conflicts.py",
        "return self._keys is None or super().is_due(state)",
        "return self._keys is None",
        ("tests/test_interleavings.py::test_a_key_that_is_committed_while_it_looks",),
    ),
    Fault(
        "what-others-commit-is-not-looked-at",
        "A commit does not look again at what others have committed since it looked.",
        "managed/writer.py",
        "            if effect.is_due(state):\n                return None  # others have committed since\n",
        "",
        ("tests/test_interleavings.py::test_a_key_that_is_committed_while_it_looks",),
    ),
    Fault(
        "a-committed-write-is-aborted",
        "An abort is put into the log behind the commit of the same write.",
        "managed/aborts.py",
        "if write is None or write.ended_at is not None:\n                    return None\n",
        "if write is None:\n                    return None\n",
        ("tests/test_writing.py::test_a_commit_whose_answer_was_lost",),
    ),
    Fault(
        "files-of-a-committed-write-are-removed",
        "What is tidied up after a commit is not only what attempts of tasks have left, but all files of the write.",
        "managed/aborts.py",
        'if file.url.removeprefix(self._log.url + "/") not in named:',
        "if file.url not in named:",
        ("tests/test_writing.py::test_files_of_other_attempts",),
    ),
    Fault(
        "a-batch-is-committed-twice",
        "A stream's micro-batch that is committed already is written once more.",
        "table/log/state.py",
        "return self.batches.get(batch.query, -1) >= batch.id",
        "return self.batches.get(batch.query, -1) > batch.id",
        ("tests/test_writing.py::test_a_batch_of_a_name_is_written_once",),
    ),
    Fault(
        "vacuum-removes-what-is-needed",
        "Vacuum removes files that the oldest version which is kept is made of.",
        "managed/vacuum.py",
        " and write.id not in needed)",
        ")",
        ("tests/test_compaction.py::test_vacuum_removes_what_no_version_needs",),
    ),
    Fault(
        "vacuum-removes-what-is-being-written",
        "Vacuum removes the files of writes that have not ended.",
        "managed/vacuum.py",
        "path.startswith(opened) or ",
        "",
        ("tests/test_compaction.py::test_vacuum_removes_orphans",),
    ),
    Fault(
        "vacuum-removes-what-is-young",
        "Vacuum removes files that were put a moment ago.",
        "managed/vacuum.py",
        " or _put_at_s(file) > until_s:",
        ":",
        ("tests/test_compaction.py::test_vacuum_removes_orphans",),
    ),
    Fault(
        "a-living-writer-is-aborted",
        "A writer counts as dead before lookup.write.timeout is over.",
        "managed/heartbeat.py",
        "if now_s - since_s >= self._timeout_s]",
        "if now_s - since_s >= 0]",
        ("tests/test_writing.py::test_a_dead_writer_is_aborted",),
    ),
    Fault(
        "signs-of-life-are-not-seen",
        "A writer counts as dead after the timeout although it shows that it lives.",
        "managed/heartbeat.py",
        "ids[id_] = [signs, now_s if signs != count else since_s]",
        "ids[id_] = [signs, since_s]",
        ("tests/test_writing.py::test_a_living_writer_is_not",),
    ),
    Fault(
        "a-file-that-may-not-be-there-is-named",
        "An event names a file of which nobody knows whether it was put.",
        "managed/data_files.py",
        'raise UfsUnavailableError(f"nothing was written to {self._url}: {problem.__cause__}") from problem',
        "return DataFile(name, len(data), rows)",
        ("tests/test_writing.py::test_a_file_of_which_nothing_is_known_is_not_named",),
    ),
    # --- providers
    Fault(
        "one-attempt-less-at-a-provider",
        "A provider's call that fails is tried once less than lookup.max-retries says.",
        "providers/provider.py",
        "tenacity.stop_after_attempt(self._options.max_retries + 1)",
        "tenacity.stop_after_attempt(max(self._options.max_retries, 1))",
        ("tests/providers/test_functions.py::test_attempts",),
    ),
    Fault(
        "a-call-has-no-timeout-of-its-own",
        "One of several calls to a provider may take longer than lookup.async.timeout.",
        "providers/provider.py",
        "await asyncio.wait_for(tried(), self._options.async_timeout_s)",
        "await asyncio.wait_for(tried(), None)",
        ("tests/providers/test_functions.py::test_an_asynchronous_lookup_that_waits_for_ever",),
    ),
    Fault(
        "a-hanging-call-is-waited-for",
        "A provider's call that hangs is waited for without an end.",
        "providers/call_runner.py",
        "future.result(timeout_s)",
        "future.result()",
        ("tests/providers/test_functions.py::test_a_lookup_that_hangs",),
    ),
    Fault(
        "rows-of-other-keys-are-taken",
        "A row that a provider returns for a key which was not asked for is taken.",
        "providers/returned_rows.py",
        "if len(matches.rows) < rows.num_rows:",
        "if len(matches.rows) < 0:",
        ("tests/providers/test_functions.py::test_a_bad_answer_is_an_error_and_nothing_else",),
    ),
    # --- options, errors, text files
    Fault(
        "credentials-are-shown",
        "An error shows the user and password of a URL.",
        "base/errors.py",
        '_USER = re.compile(r"(\\w+://)[^/?#\\s]+@")',
        '_USER = re.compile(r"(\\w+://)[^/?#\\s]+@@")',
        ("tests/test_options.py::test_messages_are_redacted",),
    ),
    Fault(
        "unknown-options-are-taken",
        "A misspelled option is taken without a word.",
        "options/lookup_options.py",
        'raise OptionError(f"unknown option {key} = {redact(key, text)!r}: {hint}")',
        'return _FIELDS["lookup.keys"] if hint else field',
        ("tests/test_options.py::test_an_unknown_key_is_refused_with_the_nearest",),
    ),
    Fault(
        "secrets-are-taken-from-a-read",
        "A credential is taken as an option of a read, where plans and catalogs store it.",
        "options/lookup_options.py",
        "if not allowed and key.startswith(STORAGE)",
        "if not key and key.startswith(STORAGE)",
        ("tests/test_options.py::test_a_secret_is_refused_as_a_read_or_table_option",),
    ),
    Fault(
        "the-header-of-a-csv-file-is-a-row",
        "The first line of a CSV file with a header is one of its rows.",
        "scan/formats/csv_text.py",
        "skip_rows_after_names=1 if options.header else 0",
        "skip_rows_after_names=0",
        ("tests/test_formats.py::test_a_late_value_decides_the_type",),
    ),
    Fault(
        "the-names-of-a-csv-file-are-lost",
        "The columns of a CSV file with a header are named _c0, _c1, ….",
        "scan/formats/csv_text.py",
        "    if header:\n",
        "    if not header:\n",
        ("tests/test_formats.py::test_a_late_value_decides_the_type",),
    ),
    Fault(
        "integers-overflow",
        "A column of text with integers beyond 64 bits is taken for one of 64 bits.",
        "scan/formats/inference.py",
        "fits64 = before[0] <= 18 or",
        "fits64 = before[0] <= 19 or",
        ("tests/test_text_files.py::test_types",),
    ),
    Fault(
        "instants-lose-their-zone",
        "Times with an offset become times of day without one.",
        "scan/formats/inference.py",
        '_INSTANT, _LOCAL = pa.timestamp("us", tz="UTC"), pa.timestamp("us")',
        '_INSTANT, _LOCAL = pa.timestamp("us"), pa.timestamp("us")',
        ("tests/test_text_files.py::test_types",),
    ),
]
