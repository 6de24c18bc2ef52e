import java.io.IOException;
import java.lang.management.ManagementFactory;
import java.lang.management.ThreadMXBean;
import java.nio.ByteOrder;
import java.nio.IntBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.Collection;
import java.util.Collections;
import org.apache.flink.metrics.groups.UnregisteredMetricsGroup;
import org.apache.flink.table.connector.source.lookup.cache.DefaultLookupCache;
import org.apache.flink.table.data.GenericRowData;
import org.apache.flink.table.data.RowData;
import org.apache.flink.table.data.StringData;

/**
 * Time of Flink's DefaultLookupCache.getIfPresent, batch by batch; run by benchmarks/bench_flink.py.
 *
 * <p>Arguments: a directory with entries.bin and keys-WORKLOAD.bin (little-endian ints), the keys of a batch, the
 * batches to warm up with, and the workloads. The first batches of a workload warm up, the others are timed. A line
 * per workload: its name, the hits and the sums of found ids and prices, then nanoseconds of this thread per batch.
 */
public final class DefaultLookupCacheBench {
    private DefaultLookupCacheBench() {}

    public static void main(String[] arguments) throws Exception {
        Path directory = Path.of(arguments[0]);
        int batch = Integer.parseInt(arguments[1]);
        int warmup = Integer.parseInt(arguments[2]);
        DefaultLookupCache cache = filled(ints(directory.resolve("entries.bin")), batch);
        for (int place = 3; place < arguments.length; place++) {
            measure(cache, arguments[place], ints(directory.resolve("keys-" + arguments[place] + ".bin")), batch, warmup);
        }
        cache.close();
    }

    private static int[] ints(Path path) throws IOException {
        IntBuffer buffer = java.nio.ByteBuffer.wrap(Files.readAllBytes(path)).order(ByteOrder.LITTLE_ENDIAN).asIntBuffer();
        int[] values = new int[buffer.remaining()];
        buffer.get(values);
        return values;
    }

    private static DefaultLookupCache filled(int[] ids, int batch) {
        ThreadMXBean threads = ManagementFactory.getThreadMXBean();
        DefaultLookupCache cache = DefaultLookupCache.newBuilder().expireAfterWrite(Duration.ofHours(1)).build();
        cache.open(UnregisteredMetricsGroup.createCacheMetricGroup());
        StringBuilder times = new StringBuilder();
        for (int start = 0; start < ids.length; start += batch) {
            int end = Math.min(start + batch, ids.length);
            // Built before the clock starts, although a source makes them of what it receives.
            RowData[] keys = new RowData[end - start];
            RowData[] rows = new RowData[end - start];
            for (int place = start; place < end; place++) {
                int id = ids[place];
                keys[place - start] = GenericRowData.of(id);
                rows[place - start] =
                        GenericRowData.of(
                                id,
                                id / 2.0,
                                StringData.fromString(String.format("name-%019d", id)),
                                StringData.fromString(String.format("segment-%05d-of-customers", id % 1000)),
                                StringData.fromString(String.format("country-%03d", id % 200)));
            }
            long began = threads.getCurrentThreadCpuTime();
            for (int place = 0; place < keys.length; place++) {
                cache.put(keys[place], Collections.singletonList(rows[place]));
            }
            long took = threads.getCurrentThreadCpuTime() - began;
            if (keys.length == batch) {
                times.append(' ').append(took);
            }
        }
        System.out.println("put " + ids.length + " 0 0" + times);
        return cache;
    }

    private static void measure(DefaultLookupCache cache, String workload, int[] keys, int batch, int warmup) {
        ThreadMXBean threads = ManagementFactory.getThreadMXBean();
        // Built before the clock starts, although a lookup join makes one per row.
        RowData[] probed = new RowData[keys.length];
        for (int place = 0; place < keys.length; place++) {
            probed[place] = GenericRowData.of(keys[place]);
        }
        @SuppressWarnings("unchecked")
        Collection<RowData>[] found = (Collection<RowData>[]) new Collection<?>[batch];
        System.gc();
        StringBuilder times = new StringBuilder();
        long hits = 0;
        long ids = 0;
        double prices = 0;
        for (int start = 0; start < keys.length; start += batch) {
            long began = threads.getCurrentThreadCpuTime();
            for (int place = 0; place < batch; place++) {
                found[place] = cache.getIfPresent(probed[start + place]);
            }
            long took = threads.getCurrentThreadCpuTime() - began;
            if (start < warmup * batch) {
                continue;
            }
            times.append(' ').append(took);
            for (Collection<RowData> rows : found) {
                if (rows != null) {
                    for (RowData row : rows) {
                        hits++;
                        ids += row.getInt(0);
                        prices += row.getDouble(1);
                    }
                }
            }
        }
        System.out.println(workload + " " + hits + " " + ids + " " + prices + times);
    }
}
